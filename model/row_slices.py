"""The slices of the columns of row-parallel weights, which no number of ranks up to theirs cuts."""

from typing import Final

from .spec import DecoderSpec, ExpertsSpec

MOST_SLICES: Final = 8  # the largest tp over which sums can be the same


def most_slices(spec: DecoderSpec) -> int:
    """Returns S, the number of slices of row-parallel sums at which every tp that divides S gives the same sums.

    S is the largest power of two up to 8 that divides the number of heads and every intermediate size.
    """
    blocks = [layer.feed_forward for layer in spec.layers]
    shared = [block.shared for block in blocks if isinstance(block, ExpertsSpec) and block.shared]
    sizes = {spec.num_heads, *(block.inner for block in (*blocks, *shared))}
    slices = MOST_SLICES
    while any(size % slices for size in sizes):
        slices //= 2
    return slices
