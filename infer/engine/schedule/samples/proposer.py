"""Proposals for the next tokens of a sample by prompt lookup: those that followed the same tokens before.

The idea is that of Saxena, "Prompt Lookup Decoding" (2023). A step computes the proposals behind the sample's last
token, the worker samples after each of them, and those that equal the sampled tokens are kept. No draft model takes
part, and every token is the one that would have come without proposals.

A sample follows a place of its text, and every token that comes shows whether the place was right, proposed or
not. So it knows how often tokens come true after runs of each length, before it costs anything to propose them.
"""

from collections.abc import Sequence
from typing import Final

from .ngram_index import NgramIndex

_LONGEST_RUN: Final = 8  # runs of at least so many tokens count alike
_WEIGHT: Final = 2.0  # of the first guess, in tokens
_MEMORY: Final = 0.97  # the part of their weight that earlier tokens keep with every later one
_BULK: Final = 32  # of so many tokens at once, a prompt, only the end is followed


class Proposer:
    """The proposals for one sample, and their chances.

    It expects the token that stands where the last tokens stood before. After a surprise it looks for another such
    place; if there is none, one token may just have been replaced, and it goes on behind that, until the next surprise.

    Args:
        most: the largest number of proposals at once.
    """

    def __init__(self, most: int) -> None:
        self._index = NgramIndex()
        self._most = most
        self._source = 0  # the place of the token that is expected; 0: none is
        self._run = 0  # how many tokens before it were as expected, or stood together there
        self._is_replaced = False  # whether the last token was a surprise that is taken for a replacement
        runs = range(_LONGEST_RUN + 1)
        self._right = [_WEIGHT * (run + 1) / (run + 3) for run in runs]  # of the tokens after a run of each length
        self._seen = [_WEIGHT for _ in runs]

    def __len__(self) -> int:
        """The number of tokens that it has read."""
        return len(self._index)

    def propose(self, new: Sequence[int], num_unknown: int, most: int) -> tuple[list[int], list[float]]:
        """Returns the tokens that may follow, and the chance of each that it comes true with all before it.

        Args:
            new: the tokens of the sample after those that it has read.
            num_unknown: the number of tokens after these that are sampled and not known yet.
            most: the largest number of proposals.
        """
        self._read(new)
        count = min(most, self._most)
        if not self._source or count <= 0:
            return [], []
        chance, chances = 1.0, []
        for run in range(self._run, self._run + num_unknown + count):
            chance *= self._right[min(run, _LONGEST_RUN)] / self._seen[min(run, _LONGEST_RUN)]
            chances.append(chance)
        return self._index.continuation(self._source, num_unknown + count)[num_unknown:], chances[num_unknown:]

    def _read(self, new: Sequence[int]) -> None:
        if len(new) >= _BULK:
            self._index.extend(new)
            self._source, self._run = self._index.find()
            return
        for token in new:
            is_right = self._source > 0 and self._learn(token)
            self._index.extend((token,))
            if is_right:
                self._source, self._run, self._is_replaced = self._source + 1, self._run + 1, False
            else:
                self._look()

    def _learn(self, token: int) -> bool:
        """Returns whether the next token is the expected one, and counts it."""
        is_right = self._index.continuation(self._source, 1)[0] == token
        run = min(self._run, _LONGEST_RUN)
        self._right[run] = _MEMORY * self._right[run] + is_right
        self._seen[run] = _MEMORY * self._seen[run] + 1
        return is_right

    def _look(self) -> None:
        """Looks for the place to follow after a token that was not expected."""
        place, size = self._index.find()
        if not size and self._source and not self._is_replaced:
            self._source, self._run, self._is_replaced = self._source + 1, 0, True
        else:
            self._source, self._run, self._is_replaced = place, size, False
