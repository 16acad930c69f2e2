"""The Hadamard transform of rows in Triton: the sums of `aten/kv_cache.py`, in their order."""

import triton
import triton.language as tl


@triton.jit
def hadamard(x: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Transforms fp32 [ROWS, WIDTH] in blocks of SIZE, all powers of two; a second time turns it back."""
    for stage in tl.static_range(0, 8):
        if (1 << stage) < SIZE:
            pairs = tl.reshape(x, (ROWS, WIDTH // (2 << stage), 2, 1 << stage))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            both = tl.join(first + second, first - second)
            x = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (ROWS, WIDTH))
    return x * (SIZE**-0.5)
