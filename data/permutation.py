"""Permutations of any size, computed index by index without a table, the same on every machine and numpy version."""

import hashlib
from typing import Final

_ROUNDS: Final = 8
_MASK: Final = (1 << 64) - 1


def derive_key(*parts: object) -> int:
    """Returns a 64-bit key, a hash of parts that must have a stable `str`."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:8], "little")


def permute(index: int, size: int, key: int) -> int:
    """Returns the image of `index` under the permutation of range(size) that `key` selects.

    It is a Feistel network over the next even number of bits (Luby and Rackoff, 1988), applied again until the result
    is below `size` (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (_mix(key + right * 0x9E3779B97F4A7C15 + round_number) & mask)
        index = left << half | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """Mixes 64 bits with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
