"""An index of a growing text of tokens, which finds where the last ones stood before, and so those that may follow."""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

LONGEST: Final = 4  # tokens of an n-gram; longer ones are looked for first
SHORTEST: Final = 2
_LEAST_BITS: Final = 8
_BULK: Final = 32  # so many tokens at once are hashed by numpy
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_MASK: Final = 2**64 - 1


class NgramIndex:
    """The tokens of a text, and the last place after each of its n-grams.

    One table of places serves n-grams of all lengths. Of two with one entry the later keeps it, and tokens are compared
    on a find: a collision can hide a place and never shows a wrong one. A token costs four multiplications and a
    find costs as many, whatever the length of the text; a token takes at most 68 bytes.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._bits = _LEAST_BITS
        self._table = array("i", bytes(4 << _LEAST_BITS))  # 0: no place, since nothing stands before the first token

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end."""
        start = len(self._tokens)
        self._tokens.extend(tokens)
        if 8 * len(self._tokens) > 1 << self._bits:
            self._bits = (8 * len(self._tokens)).bit_length()
            self._table = array("i", bytes(4 << self._bits))
            start = 0
        if len(self._tokens) - start >= _BULK:
            self._enter_all(start)
            return
        for place in range(start, len(self._tokens)):
            for entry in self._entries(place):
                self._table[entry] = place

    def find(self) -> tuple[int, int]:
        """Returns the last place before the end after which the last tokens stood together, and how many of them did.

        Returns:
            The place of the token that followed them, and a number from SHORTEST to LONGEST; (0, 0) if they never did.
        """
        stop = len(self._tokens)
        for size, entry in reversed([*enumerate(self._entries(stop), SHORTEST)]):
            place = self._table[entry]
            if place >= size and self._tokens[place - size : place] == self._tokens[stop - size : stop]:
                return place, size
        return 0, 0

    def continuation(self, place: int, count: int) -> list[int]:
        """Returns `count` tokens from a place on; where the text ends before, it goes round from there to its end."""
        found = self._tokens[place : place + count].tolist()
        while len(found) < count:
            found += found[: count - len(found)]
        return found

    def _entries(self, place: int) -> list[int]:
        """Returns the table's entries of the n-grams that end before a place, the shortest first."""
        tokens, shift, value, found = self._tokens, 64 - self._bits, 0, []
        for size in range(1, min(LONGEST, place) + 1):
            value = (value + tokens[place - size] + 1) * _MULTIPLIER & _MASK
            if size >= SHORTEST:
                found.append(value >> shift)
        return found

    def _enter_all(self, start: int) -> None:
        """Enters the places from `start` on as `extend` does, at once."""
        table, tokens = np.frombuffer(self._table, np.int32), np.frombuffer(self._tokens, np.int32).astype(np.uint64)
        stop, value = len(tokens), np.zeros(len(tokens) + 1, np.uint64)
        shift: Any = np.uint64(64 - self._bits)
        for size in range(1, LONGEST + 1):
            first = max(start, size)
            before = tokens[first - size : stop - size]
            value[first:stop] = (value[first:stop] + before + np.uint64(1)) * np.uint64(_MULTIPLIER)
            if size >= SHORTEST:
                table[value[first:stop] >> shift] = np.arange(first, stop, dtype=np.int32)
