"""Causal attention of training on a GPU, by the kernel that core/gpu_attention.py chooses.

Letters: B rows, L positions, T positions of all rows, H query heads, K kv heads, E head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.errors import ConfigError
from ...core.extras import release_of
from ...core.gpu_attention import AttentionCase, AttentionChoice, choose_attention
from ...core.gpu_cards import Capability
from ...model.attention import AttendingLayer
from ...parallel.streams import sent
from ...parallel.torch_dtypes import format_of
from .window_blocks import attend_in_window

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the choice of a kernel depends on beside the heads and the rows.

    Attributes:
        capability: the compute capability of the GPU.
        deterministic: whether torch's algorithms must be deterministic.
        release: major and minor number of torch's version.
    """

    capability: Capability
    deterministic: bool
    release: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> "GpuFacts | None":
        """Returns the facts of a device; None for a CPU."""
        if device.type == "cpu":
            return None
        capability = torch.cuda.get_device_capability(device)
        return cls(capability, torch.are_deterministic_algorithms_enabled(), release_of(str(torch.__version__)))


class GpuAttention:
    """An `Attend` within documents, or within rows of one length.

    Args:
        facts: the GPU.
        documents: the documents' lengths over the flattened rows; () for rows that are one document each.
    """

    def __init__(self, facts: GpuFacts, documents: Sequence[int]) -> None:
        self._facts, self._documents = facts, tuple(documents)
        self._ends: torch.Tensor | None = None

    def __call__(
        self, at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor
    ) -> torch.Tensor:
        """Returns the outputs [B, L, H, E].

        Raises:
            ConfigError: no kernel computes such heads on this GPU.
        """
        head_dim, longest = q_BLHE.shape[-1], max(self._documents, default=q_BLHE.shape[1])
        window = at.window if at.window is not None and at.window < longest else None
        choice = self._choice(q_BLHE, k_BLKE, window)
        if choice.kernel == "refuse":
            raise ConfigError(f"Attention cannot be computed here: {choice.why}.")
        heads = _fitted(choice, q_BLHE, k_BLKE, v_BLKE)
        scale = head_dim**-0.5
        if choice.kernel == "varlen":
            ends, flat = self._all_ends(q_BLHE), [each.flatten(0, 1) for each in heads]
            out = varlen((flat[0], flat[1], flat[2]), ends, longest, window, scale).view(heads[0].shape)
        elif choice.kernel == "blocks":
            out = self._in_blocks(heads, window, choice.queries, scale)
        else:
            q, k, v = (each.transpose(1, 2) for each in heads)
            out = flash(scale, q, k, v, choice.cudnn) if choice.kernel == "flash" else efficient(scale, q, k, v)
            out = out.transpose(1, 2)
        return out[..., :head_dim]

    def _choice(self, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, window: int | None) -> AttentionChoice:
        facts, (heads, head_dim) = self._facts, q_BLHE.shape[-2:]
        dtype, documents = format_of(q_BLHE.dtype).name, bool(self._documents)
        sizes = (heads, k_BLKE.shape[-2], head_dim, window, documents)
        return choose_attention(AttentionCase(facts.capability, dtype, *sizes, facts.deterministic, facts.release))

    def _all_ends(self, q_BLHE: torch.Tensor) -> torch.Tensor:
        """Returns the ends of all documents with 0 before them, int32 on the device."""
        if not self._documents:
            length = q_BLHE.shape[1]
            num_positions = q_BLHE.shape[0] * length
            return torch.arange(0, num_positions + 1, length, dtype=torch.int32, device=q_BLHE.device)
        if self._ends is None:  # one copy for all layers
            ends = torch.tensor([0, *accumulate(self._documents)], dtype=torch.int32)
            self._ends = sent(ends, q_BLHE.device)
        return self._ends

    def _in_blocks(self, heads: Heads, window: int | None, queries: int, scale: float) -> torch.Tensor:
        """Computes each document, or all rows if they are one each; in a window some queries at a time."""
        documents = list(self._documents)
        pieces = [each.flatten(0, 1).unsqueeze(0).split(documents, 1) if documents else (each,) for each in heads]
        parts = []
        for piece in zip(*pieces, strict=True):
            q, k, v = (each.transpose(1, 2) for each in piece)
            if window is None or window >= q.shape[2]:
                out = efficient(scale, q, k, v)
            else:
                out = attend_in_window(q, k, v, window, queries, partial(efficient, scale))
            parts.append(out.transpose(1, 2))
        return torch.cat(parts, dim=1).view(heads[0].shape)


def _fitted(choice: AttentionChoice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
    """Returns heads as the kernel takes them: of its width, with zeros at their end, and as many as it needs."""
    if choice.repeats:
        k, v = (each.repeat_interleave(q.shape[-2] // each.shape[-2], dim=-2) for each in (k, v))
    more = choice.width - q.shape[-1]
    if more:
        q, k, v = (F.pad(each, (0, more)) for each in (q, k, v))
    return q, k, v


def varlen(heads_THE: Heads, ends: torch.Tensor, longest: int, window: int | None, scale: float) -> torch.Tensor:
    """Computes FlashAttention of documents that follow one another, [T, H, E].

    Args:
        ends: int32, 0 and the end of each document.
        longest: the length of the longest document.
        window: the number of positions that a query sees, its own included; None for all before it.
        scale: the factor of scores.
    """
    from torch.nn.attention.varlen import varlen_attn  # it loads torch's compiler, which takes seconds

    q, k, v = heads_THE
    seen = (-1 if window is None else window - 1, 0)
    # torch 2.11 has no such argument, and gets as many kv heads as query heads.
    attend = partial(varlen_attn, enable_gqa=True) if k.shape[1] < q.shape[1] else varlen_attn
    out = attend(q, k, v, ends, ends, longest, longest, scale=scale, window_size=seen)
    assert isinstance(out, torch.Tensor), "no other results were asked for"
    return out


def flash(scale: float, q_BHLE: torch.Tensor, k_BKLE: torch.Tensor, v_BKLE: torch.Tensor, cudnn: bool) -> torch.Tensor:
    """Computes FlashAttention of whole rows, [B, H, L, E], or cuDNN's, if `cudnn` and torch prefers it."""
    grouped = k_BKLE.shape[1] < q_BHLE.shape[1]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *([SDPBackend.CUDNN_ATTENTION] if cudnn else [])]):
        return F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, is_causal=True, scale=scale, enable_gqa=grouped)


def efficient(
    scale: float, q_BHLE: torch.Tensor, k_BHLE: torch.Tensor, v_BHLE: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes memory-efficient attention, [B, H, L, E]: causal, or of the keys that a mask shows to each query."""
    causal = seen is None
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q_BHLE, k_BHLE, v_BHLE, attn_mask=seen, is_causal=causal, scale=scale)
