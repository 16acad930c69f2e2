"""Which kernel computes causal attention on a GPU: a pure function of the card, the heads and the rows (no torch).

Kernels of torch alone, and none whose memory grows with the square of a row's length:

- flash: FlashAttention of whole rows; cuDNN's instead where torch prefers it, since all rows have one length. cuDNN
  plans each new length for some tenths of a second, so it gets no others.
- varlen: FlashAttention of documents of any lengths in one call, in windows too.
- efficient: torch's memory-efficient attention, for what FlashAttention does not take.
- blocks: the same for each document by itself, in a window for some queries at a time, with a mask for those.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from .gpu_cards import Capability, gpu_features
from .integers import round_up

AttentionKernel = Literal["varlen", "flash", "efficient", "blocks", "refuse"]
MOST_MASK_BYTES: Final = 64 << 20
_PAIR_BYTES: Final = 9  # of a mask: a bool, the fp32 number that torch makes of it, and its copy with aligned rows
_MOST_QUERIES, _FEWEST_QUERIES = 1024, 8
_WIDEST: Final = 256  # head dims of FlashAttention
_NARROW_BACKWARD: Final = range(193, 225)  # head dims whose backward some cards have not the shared memory for
_GROUPED_VARLEN: Final = (2, 12)  # the first torch that promises varlen attention with fewer kv heads


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Attention of one layer of training.

    Attributes:
        capability: the compute capability of the GPU.
        dtype: "fp32", "bf16" or "fp16", or another that no kernel takes.
        heads, kv_heads: the numbers of query heads and of kv heads of a rank.
        head_dim: the dims that each query and key has.
        window: the number of positions that a query sees; None for all before it.
        documents: whether rows hold several documents, which are apart.
        deterministic: whether the bits must be the same in every run.
        release: major and minor number of torch's version.
    """

    capability: Capability
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    documents: bool
    deterministic: bool
    release: tuple[int, int]

    @property
    def uneven(self) -> bool:
        """Whether queries see no more than a part of their row's keys before them."""
        return self.documents or self.window is not None


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The kernel of a case.

    Attributes:
        kernel: its name, see above; "refuse" for a case that no kernel computes.
        why: the reason, in words.
        width: the dims of the heads that the kernel gets, padded with zeros.
        repeats: whether it gets a kv head for each query head.
        cudnn: whether cuDNN's kernel may take its place.
        queries: how many queries "blocks" gives a mask at a time; 0 for no mask.
    """

    kernel: AttentionKernel
    why: str
    width: int
    repeats: bool = False
    cudnn: bool = False
    queries: int = 0

    def mask_bytes(self, window: int) -> int:
        """Returns the bytes of the largest mask in a window."""
        return self.queries * (self.queries + window - 1) * _PAIR_BYTES


def choose_attention(case: AttentionCase) -> AttentionChoice:
    """Returns the kernel that computes a case."""
    if problem := _problem(case):
        return AttentionChoice("refuse", problem, case.head_dim)
    grouped = case.kv_heads < case.heads
    width = _flash_width(case.capability, case.head_dim)
    if width > _WIDEST or not _has_flash(case.capability, case.dtype):
        return _without_flash(case, grouped)
    if case.uneven:
        text = "documents, a window or both in one call: torch's varlen attention, whatever the lengths"
        return AttentionChoice("varlen", text, width, repeats=grouped and case.release < _GROUPED_VARLEN)
    cudnn = case.capability[0] in (9, 10) and not case.deterministic
    text = "whole rows in 16 bits: FlashAttention"
    either = f"{text}, or cuDNN's kernel, as all rows have one length"
    return AttentionChoice("flash", either if cudnn else text, width, cudnn=cudnn)


def _problem(case: AttentionCase) -> str:
    """Returns the reason why no kernel computes a case; "" if one does."""
    major, minor = case.capability
    if case.dtype not in ("fp32", "bf16", "fp16"):
        return f"attention on GPUs takes fp32, bf16 and fp16, not {case.dtype}: set precision.params to one of them"
    if case.dtype == "bf16" and not gpu_features(case.capability).bf16:
        return (
            f"this GPU, of compute capability {major}.{minor}, has no bf16 (8.0 and newer have): "
            'set precision.params = "fp16" or "fp32"'
        )
    if case.heads % case.kv_heads:
        return f"{case.heads} query heads are no multiple of {case.kv_heads} kv heads: choose other numbers of heads"
    return ""


def takes_flash(capability: Capability, dtype: str, head_dim: int) -> bool:
    """Returns whether FlashAttention computes heads as they are, forward and backward."""
    return _has_flash(capability, dtype) and head_dim <= _WIDEST and _flash_width(capability, head_dim) == head_dim


def _has_flash(capability: Capability, dtype: str) -> bool:
    return dtype in ("bf16", "fp16") and gpu_features(capability).flash


def _flash_width(capability: Capability, head_dim: int) -> int:
    """Returns the head dims that FlashAttention computes: multiples of 8, and all 256 where it has no backward."""
    narrow = head_dim in _NARROW_BACKWARD and not gpu_features(capability).wide_heads
    return _WIDEST if narrow else round_up(head_dim, 8)


def _without_flash(case: AttentionCase, grouped: bool) -> AttentionChoice:
    """Returns the choice where FlashAttention does not take the heads."""
    major, minor = case.capability
    if case.dtype == "fp32":
        cause = "FlashAttention has no fp32"
    elif case.head_dim > _WIDEST:
        cause = f"FlashAttention has heads of up to {_WIDEST} dims"
    else:
        cause = f"FlashAttention needs compute capability 8.0, and this is {major}.{minor}"
    width = round_up(case.head_dim, 4 if case.dtype == "fp32" else 8)
    if not case.uneven:
        return AttentionChoice("efficient", f"{cause}: memory-efficient attention", width, repeats=grouped)
    queries = 0 if case.window is None else block_queries(case.window)
    text = f"{cause}: memory-efficient attention, each document by itself"
    if queries:
        text = f"{cause}: memory-efficient attention of {queries} queries at a time, whose masks take at most 64 MiB"
    return AttentionChoice("blocks", text, width, repeats=grouped, queries=queries)


def block_queries(window: int) -> int:
    """Returns how many queries see a window at once, so that their mask takes at most 64 MiB."""
    queries = _MOST_QUERIES
    while queries > _FEWEST_QUERIES and queries * (queries + window - 1) * _PAIR_BYTES > MOST_MASK_BYTES:
        queries //= 2
    return queries


def attention_by_rows(
    capability: Capability, dtype: str, head_dim: int, release: tuple[int, int]
) -> Iterator[tuple[str, AttentionChoice]]:
    """Yields the choice for each kind of rows, with its name, of heads that are grouped."""
    for name, window, documents in (("whole rows", None, False), ("documents", None, True), ("a window", 4096, False)):
        case = AttentionCase(capability, dtype, 8, 2, head_dim, window, documents, False, release)
        yield name, choose_attention(case)
