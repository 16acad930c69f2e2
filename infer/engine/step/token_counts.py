"""How often tokens under penalties occur in an output: arrays that grow with it, so that no step reads it again."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

_SPARE: Final = 64  # places for tokens that are new in the output


class TokenCounts:
    """Token ids and their numbers of occurrences.

    Args:
        counts: token id -> its occurrences in the output so far; 0 for a token that only the prompt has.
    """

    def __init__(self, counts: Mapping[int, int] = MappingProxyType({})) -> None:
        self._place = {token: place for place, token in enumerate(counts)}
        self._pairs = np.zeros((2, len(counts) + _SPARE), np.int32)
        self._pairs[0, : len(counts)] = list(counts)
        self._pairs[1, : len(counts)] = list(counts.values())

    def __len__(self) -> int:
        return len(self._place)

    def add(self, tokens: Iterable[int]) -> None:
        """Counts one more occurrence of each token."""
        for token in tokens:
            place = self._place.setdefault(token, len(self))
            if place == self._pairs.shape[1]:
                self._pairs = np.concatenate([self._pairs, np.zeros_like(self._pairs)], axis=1)
            self._pairs[0, place] = token
            self._pairs[1, place] += 1

    def plus(self, tokens: Iterable[int]) -> "TokenCounts":
        """Returns other counts, with one more occurrence of each token."""
        found = TokenCounts(dict(self._pairs[:, : len(self)].T.tolist()))
        found.add(tokens)
        return found

    def columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Returns the token ids and their counts, int32 [N] each: views, which a later `add` may change."""
        return self._pairs[0, : len(self)], self._pairs[1, : len(self)]
