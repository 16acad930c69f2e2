"""The sizes of a rank's memory beside its weights: what it allocates, and what the memory plan counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .....core.dtypes import BF16
from .....core.integers import ceil_div, round_up
from .....core.quantization import Grouping
from ...kv_formats import GROUP, INT8, BlockBytes, CacheShape, VectorFormat, kv_format
from ...options import MAX_HEAD_ROWS
from ...program.adapters import adapted_matrices, expert_matrices, padded_ranks
from ...program.lower import Program
from ...program.operations import Head, Multiply, Route, RunExperts
from ..sampler.block import results_bytes, scratch_bytes
from .binding.memory import LARGE_PAGE
from .binding.structures import (
    ATTENTION_ROWS,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    EXPERT_TOKENS,
    KEY_TILE,
    MOST_ROWS,
    PANEL,
    Buffer,
    Format,
)
from .packing import pair_bytes, stacks

_FLOAT: Final = 4  # bytes; activations are computed in fp32
_INT: Final = 4


@dataclass(frozen=True, slots=True)
class PageSize:
    """The bytes of a page, the keys or the values of a block and kv head, and of its elements, before its scales."""

    num_bytes: int
    elements: int

    @staticmethod
    def of(vectors: VectorFormat, head_dim: int, block_size: int) -> "PageSize":
        """Returns the size of a page of vectors, whose heads are padded to whole panels."""
        pairs = round_up(head_dim, PANEL) * block_size // (2 * PANEL)
        elements = pairs * pair_bytes(Format[vectors.name.upper()])
        return PageSize(elements + vectors.num_scale_bytes(head_dim) * block_size, elements)


def block_bytes(program: Program, cache: CacheShape) -> BlockBytes:
    """Returns the bytes of a block of the cache and of its twin."""
    kind, heads = kv_format(cache.dtype), program.num_layers * program.num_kv_heads
    keys, values, twins = (
        PageSize.of(vectors, program.head_dim, cache.block_size).num_bytes for vectors in (kind.keys, kind.values, INT8)
    )
    return BlockBytes(heads * (keys + values), heads * kind.num_twins * twins)


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """The sizes of the buffers of a rank.

    Attributes:
        rows, strides: the rows of each buffer of rows, and the floats from one to the next.
        areas: the bytes of other areas, by the names of their pointers in `NativeModel`.
        numbers: what `NativeModel` says of these areas.
        softmax: the floats of the state of an online softmax, of which a thread has two, and each split of attention.
    """

    rows: Mapping[Buffer, int]
    strides: Mapping[Buffer, int]
    areas: Mapping[str, int]
    numbers: Mapping[str, int]
    softmax: int

    @staticmethod
    def of(
        program: Program,
        cache: CacheShape,
        max_tokens: int,
        threads: int,
        weight_dtype: str = "auto",
        adapter_rank: int = 0,
    ) -> "BufferSizes":
        """Returns the sizes for steps of up to `max_tokens` tokens; see `buffer_bytes`."""
        head = next(each.matrix for each in program.operations if isinstance(each, Head))
        widths = {Buffer[name.upper()]: width for name, width in program.row_widths.items()}
        widths[Buffer.LOGITS] = program.tp * round_up(head.out_features, PANEL)
        strides = {buffer: round_up(width, PANEL) for buffer, width in widths.items()}
        rows = dict.fromkeys(strides, max_tokens) | {Buffer.LOGITS: min(MAX_HEAD_ROWS, max_tokens)}
        softmax = ATTENTION_ROWS * round_up(program.head_dim, PANEL) + round_up(2 * ATTENTION_ROWS, PANEL)
        width = _prepared_width(program, weight_dtype)
        gathered = MOST_ROWS * (strides[Buffer.NORMED] + width // 2)  # rows of an expert, then prepared
        scratch_floats = round_up(max(_attention_floats(program, cache, softmax), gathered), PANEL)
        rounded_values = round_up(max_tokens, BLOCK_ROWS) * width
        angles = _FLOAT * max_tokens * (program.head_dim // 2) if program.rope is not None else 0
        areas = {
            "cosines": angles,
            "sines": angles,
            "scratch": _FLOAT * threads * scratch_floats,
            "rounded": BF16.itemsize * rounded_values,
        }
        numbers = {"scratch_floats": scratch_floats, "rounded_values": rounded_values}
        top_k = max((each.top_k for each in program.operations if isinstance(each, Route)), default=0)
        if adapter_rank:
            numbers["low_stride"] = _low_width(program, adapter_rank)
            low_rows = max(max_tokens, EXPERT_TOKENS * top_k)
            areas["low"] = _FLOAT * low_rows * numbers["low_stride"]
        experts = [each for each in program.operations if isinstance(each, RunExperts)]
        if experts:
            inner, pairs = max(each.inner for each in experts), EXPERT_TOKENS * top_k
            numbers["expert_inner_stride"], numbers["expert_gated_stride"] = (
                round_up(2 * inner, PANEL),
                round_up(inner, PANEL),
            )
            sums = max(each.num_slices for each in experts) * pairs * strides[Buffer.PARTIAL]
            areas |= {
                "chosen": _INT * max_tokens * top_k,
                "chosen_weights": _FLOAT * max_tokens * top_k,
                "pairs": _INT * (2 * pairs + max(each.num_experts for each in experts) + 1),
                "expert_inner": _FLOAT * pairs * numbers["expert_inner_stride"],
                "expert_gated": _FLOAT * pairs * numbers["expert_gated_stride"],
                "expert_out": _FLOAT * sums,
            }
        return BufferSizes(rows, strides, areas, numbers, softmax)


def buffer_bytes(
    program: Program,
    cache: CacheShape,
    max_tokens: int,
    threads: int,
    weight_dtype: str = "auto",
    adapter_rank: int = 0,
) -> int:
    """Returns the bytes of a rank's buffers and of its sampler, as the system commits them.

    Splits of attention that threads share come on top; they are committed as they are used.

    Args:
        program: the program of rank 0, which holds the logits of all ranks.
        cache: the cache; the number of its blocks does not count.
        max_tokens: the largest number of tokens of a step.
        threads: the number of threads of the rank.
        weight_dtype: see EngineOptions.
        adapter_rank: the largest rank of an adapter; 0 without adapters.
    """
    sizes = BufferSizes.of(program, cache, max_tokens, threads, weight_dtype, adapter_rank)
    areas = [_FLOAT * sizes.rows[buffer] * sizes.strides[buffer] for buffer in sizes.rows] + [*sizes.areas.values()]
    if program.tp > 1:  # the ranks' partial sums, of which there are two, and their logits once more, joined
        areas += [_FLOAT * 2 * max_tokens * program.hidden_size, areas[Buffer.LOGITS]]
    results = results_bytes(sizes.rows[Buffer.LOGITS])
    return sum(map(_committed, areas)) + results + threads * scratch_bytes(program.vocab_size)


def _low_width(program: Program, rank: int) -> int:
    """Returns the floats of A x of a row, or of a row of an expert, of every slice, beside the weight with most."""
    slices = {each.matrix.name: each.num_slices for each in program.operations if isinstance(each, Multiply)}
    slices |= {each.down: each.num_slices for each in program.operations if isinstance(each, RunExperts)}
    matrices = [*adapted_matrices(program), *(matrix for matrix, _ in expert_matrices(program))]
    return max(slices.get(each.name, 1) * padded_ranks(program, each, rank) for each in matrices)


def _committed(num_bytes: int) -> int:
    return num_bytes if num_bytes < LARGE_PAGE else round_up(num_bytes, LARGE_PAGE)


def _attention_floats(program: Program, cache: CacheShape, softmax: int) -> int:
    """Returns the floats of a thread's scratch in attention: `struct workspace` of c/items.h."""
    head, rows = round_up(program.head_dim, PANEL), ATTENTION_ROWS
    scales = rows * 2 + KEY_TILE + round_up(rows * ceil_div(head, GROUP), PANEL)
    widened = head * cache.block_size if kv_format(cache.dtype).is_rotated else 0
    return rows * (2 * head + KEY_TILE + KEY_TILE // 2) + scales + 2 * softmax + widened


def _prepared_width(program: Program, weight_dtype: str) -> int:
    """Returns the room, in values of 2 bytes, of the widest row that a product prepares: see c/rounding.h."""
    shapes = [stack for _, stack in stacks(program, weight_dtype)]
    rounded = (each.slices * round_up(each.inputs // each.slices, BLOCK_COLUMNS) for each in shapes)
    coded = (_coded_width(each.inputs, each.grouping) for each in shapes if each.grouping)
    return max([*rounded, *coded])


def _coded_width(inputs: int, grouping: Grouping) -> int:
    """Returns the room of a row for a quantized weight: spread, or rounded with the sums of its groups behind."""
    groups = inputs // grouping.columns
    rounded = groups * round_up(grouping.columns, BLOCK_COLUMNS) + 2 * round_up(groups, PANEL)
    return max(2 * grouping.row_floats(inputs), rounded)
