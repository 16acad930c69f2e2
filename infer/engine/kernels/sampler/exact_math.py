"""Functions whose bits are the same in numpy and in C (exact_math.h): each is a fixed chain of IEEE operations.

A weight is exp of a score, rounded to a multiple of a power of two so small that every sum of V weights is exact in
float64. A sum then does not depend on its order, so vector widths, block sizes and shards of the vocabulary do not
change which tokens top-p keeps.
"""

from typing import Final

import numpy as np

from .....core.casts import Array

LOWEST: Final = np.float32(-80.0)  # exp of it is less than half of the finest step of a weight
_LOG2_E: Final = np.float32(1.44269504)
_ROUND: Final = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits
# 2^f for f from -1/2 to 1/2: the polynomial of this degree whose largest error is least.
_EXP2: Final = tuple(
    np.float32(value) for value in (1.3264724e-3, 9.671513e-3, 5.5507336e-2, 2.4022242e-1, 6.93147e-1, 1.0)
)
_LN2_DOUBLE: Final = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
_LOG: Final = (  # fdlibm, e_log.c
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)
_SQRT_HALF_BITS: Final = np.int64(0x3FE6A09E_00000000)


def weights(scores_K: Array, vocab_size: int) -> Array:
    """Computes exp(scores), rounded so that any sum of `vocab_size` of them is exact: float64 [K] in [0, 1].

    The relative error is 2.6e-7 near 0 and 1.1e-6 at -20.

    Args:
        scores_K: float32 of at most 0; -inf has the weight 0.
        vocab_size: the number of tokens of the vocabulary.
    """
    y = np.maximum(scores_K, LOWEST) * _LOG2_E
    t = y + _ROUND
    f = y - (t - _ROUND)
    p = np.full_like(f, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = p * f + coefficient
    power = ((t.view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32)
    bound = 2.0 ** vocab_size.bit_length()
    result: Array = ((p * power).astype(np.float64) + bound) - bound
    return result


def log(values: Array) -> Array:
    """Computes the natural logarithm of positive normal float64 numbers."""
    bits = values.view(np.int64)
    k = (bits - _SQRT_HALF_BITS) >> np.int64(52)  # values = 2^k * m with m about in [sqrt(1/2), sqrt(2))
    f = (bits - (k << np.int64(52))).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = np.full_like(z, _LOG[0])
    for coefficient in _LOG[1:]:
        p = p * z + coefficient
    half_square = 0.5 * f * f
    k_float = k.astype(np.float64)
    low = s * (half_square + z * p) + k_float * _LN2_DOUBLE[1]
    return k_float * _LN2_DOUBLE[0] - ((half_square - low) - f)
