"""Proposals for the next tokens of a sequence by prompt lookup: those that followed the same tokens before.

The idea is that of Saxena, "Prompt Lookup Decoding" (2023). A step computes the proposals behind the sequence's last
token, the worker samples after each of them, and those that equal the sampled tokens are kept. No draft model takes
part, and every token is the one that would have come without proposals.
"""

from collections.abc import Sequence
from typing import Final

from .ngram_index import NgramIndex

_LONGEST_PAUSE: Final = 64  # tokens


class Speculation:
    """The proposals for one sequence: many where they came true, and few, with growing pauses, where they did not.

    Args:
        most: the largest number of proposals at once.
    """

    def __init__(self, most: int) -> None:
        self._index = NgramIndex()
        self._most = self._width = most
        self._pause = 1
        self._resume = 0  # the number of tokens from which on there are proposals
        self._pending: tuple[int, list[int]] = (0, [])  # the last proposals, and the place of the first

    def __len__(self) -> int:
        """The number of tokens that it has read."""
        return len(self._index)

    def propose(self, new: Sequence[int], num_unknown: int, most: int) -> list[int]:
        """Returns the tokens that may follow.

        Args:
            new: the tokens of the sequence after those that it has read.
            num_unknown: the number of tokens after these that are sampled and not known yet.
            most: the largest number of proposals.
        """
        self._index.extend(new)
        self._learn()
        if len(self._index) < self._resume:
            return []
        count = min(most, self._width)
        found = self._index.continuation(num_unknown + count)[num_unknown:] if count > 0 else []
        self._pending = (len(self._index) + num_unknown, found)
        return found

    def _learn(self) -> None:
        """Compares the last proposals with the tokens that came, once."""
        start, proposed = self._pending
        came = self._index.tokens(start, start + len(proposed))
        if not came:
            return
        self._pending = (0, [])
        pairs = enumerate(zip(proposed, came, strict=False))
        num_right = next((i for i, (one, other) in pairs if one != other), len(came))
        if num_right:
            width = self._width if num_right == len(proposed) else num_right
            self._width, self._pause = min(self._most, 2 * width), 1
        else:
            self._width = max(1, self._width // 2)
            self._resume = len(self._index) + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
