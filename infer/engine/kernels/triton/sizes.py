"""The memory that graphs take on a rank beside what the ATen backend has, without torch."""

from typing import Final

from .....core.integers import ceil_div
from ...program.lower import Program
from .step.buckets import bucket_sizes
from .tilings import MOST_SPLITS

_FLOAT: Final = 4  # bytes, at most, of an activation
_RUNTIME_BYTES: Final = 1 << 30  # of CUDA's context, the kernels, the libraries' workspaces and the graphs themselves


def graph_bytes(program: Program, longest: int, block_size: int, max_running: int) -> int:
    """Returns the bytes of the graphs' buffers, which all buckets share, and of CUDA itself.

    Args:
        program: the rank's program.
        longest: the largest number of tokens of a sequence.
        block_size: the tokens of a block.
        max_running: the largest number of sequences of a step.
    """
    rows = bucket_sizes(max_running)[-1]
    of_row = sum(program.row_widths.values()) + 2 * program.vocab_size + ceil_div(longest, block_size)
    of_row += MOST_SPLITS * program.num_heads * (program.head_dim + 2)
    rotary = 0 if program.rope is None else 2 * longest * program.rope.rotated(program.head_dim)
    return _FLOAT * (rows * of_row + rotary) + _RUNTIME_BYTES
