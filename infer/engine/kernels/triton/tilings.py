"""The sizes of the tiles of attention's kernels, fixed by the model and never by the batch: see docs/gpu-serving.md."""

from dataclasses import dataclass
from typing import Final

from .....core.integers import ceil_div, round_up

_LEAST_WIDTH: Final = 32  # columns of a head in a kernel
_LEAST_ROWS: Final = 16  # of a product on tensor cores
MOST_SPLITS: Final = 32
_LEAST_SPLIT: Final = 256  # keys


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """The tile of a program.

    Attributes:
        rows: the query rows, a power of two: tokens times the query heads of a kv head.
        keys: the keys that are read at once, a power of two.
        warps, stages: see Triton.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def width_of(head_dim: int) -> int:
    """Returns the columns of a head in a kernel: the next power of two from 32 on."""
    return max(_LEAST_WIDTH, _power_of_two(head_dim))


def decode_tiling(head_dim: int, group: int, itemsize: int, has_twins: bool) -> AttentionTiling:
    """Returns the tile of one token's query heads that share a kv head.

    Args:
        head_dim: E.
        group: the number of these heads.
        itemsize: the bytes of an operand of products: 4 for fp32, else 2.
        has_twins: whether vectors have twins.
    """
    wide = width_of(head_dim) * itemsize > 256
    few = has_twins or wide or itemsize == 4
    warps = 8 if has_twins and wide else 4
    return AttentionTiling(max(_LEAST_ROWS, _power_of_two(group)), 32 if few else 64, warps, 2)


def prefill_tiling(head_dim: int, group: int, itemsize: int, has_twins: bool, block_size: int) -> AttentionTiling:
    """Returns the tile of some tokens' query heads that share a kv head.

    Args:
        head_dim: E.
        group: the number of these heads.
        itemsize: the bytes of an operand of products: 4 for fp32, else 2.
        has_twins: whether vectors have twins.
        block_size: the tokens of a block.
    """
    row_bytes = width_of(head_dim) * itemsize
    wide, rows = row_bytes > 128, 32 if has_twins or itemsize == 4 else 64
    keys = 32 if has_twins or wide else 64
    if has_twins and row_bytes > 256 and block_size < keys:
        rows = 16  # 32 rows beside the loop over such blocks take more registers than there are
    return AttentionTiling(max(rows, _power_of_two(group)), keys, 8 if wide else 4, 2)


def split_keys(max_context: int) -> int:
    """Returns the keys of a split of decoding: all contexts have at most `MOST_SPLITS`; a multiple of 256.

    Args:
        max_context: the most tokens of a sequence.
    """
    return max(_LEAST_SPLIT, round_up(ceil_div(max_context, MOST_SPLITS), _LEAST_SPLIT))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
