"""Counter-based noise: the bits for a token do not depend on the batch, the rank or the number of retries.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from .....core.casts import Array
from .exact_math import log

_MASK: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS: Final = 10


def philox4x32(counter: Sequence[Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Computes four random 32-bit words per counter.

    Args:
        counter: four uint64 arrays of values below 2^32, which broadcast against each other.
        key: two integers below 2^32.
    """
    c0, c1, c2, c3 = counter
    for i in range(_NUM_ROUNDS):
        k0, k1 = (np.uint64((k + i * step) & 0xFFFFFFFF) for k, step in zip(key, _KEY_STEPS, strict=True))
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ (c1 ^ k0), product1 & _MASK
        c2, c3 = (product0 >> _HALF) ^ (c3 ^ k1), product0 & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, new_number: int, token_ids_K: Array) -> Array:
    """Draws a number between 0 and 1, both excluded, per token: float64 [K].

    Philox's key is the seed; its counter is (sample index, number of the new token, token id // 4, 0), and the token
    takes the word number token id % 4, so four tokens share a draw.

    Args:
        seed: an unsigned number of 64 bits.
        sample_index: the sample's number among the request's n samples.
        new_number: the number of the new token in the sample.
        token_ids_K: the ids of the tokens in ascending order, integers [K].
    """
    draw_K = token_ids_K >> 2
    is_new_K = np.diff(draw_K, prepend=-1) != 0
    constants = (np.array([value], np.uint64) for value in (sample_index, new_number))
    counter = (*constants, draw_K[is_new_K].astype(np.uint64), np.zeros(1, np.uint64))
    words = np.stack(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)))
    word_K: Array = words[token_ids_K & 3, np.cumsum(is_new_K) - 1]
    return (word_K + 0.5) * 2.0**-32


def gumbel(uniform_K: Array) -> Array:
    """Returns standard Gumbel noise made of numbers between 0 and 1, float64 [K]."""
    return -log(-log(uniform_K))
