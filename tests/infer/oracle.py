"""Proposals that are often right, for any model: an oracle knows the answers, and is sometimes wrong on purpose."""

import random
from collections.abc import Iterable, Sequence

from tk.infer.engine.schedule.samples.proposer import Proposer


class Oracle(Proposer):
    """Proposes what follows in one of some whole texts.

    Args:
        texts: prompts with their answers.
        most: the largest number of proposals at once.
        seed: the seed of its errors; a sixth of the proposals are wrong.
    """

    def __init__(self, texts: Iterable[Sequence[int]], most: int, seed: int = 0) -> None:
        super().__init__(most)
        self._texts = [list(text) for text in texts]
        self._known: list[int] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._known)

    def propose(self, new: Sequence[int], num_unknown: int, most: int) -> tuple[list[int], list[float]]:
        """See `Proposer.propose`."""
        self._known += new
        start = len(self._known) + num_unknown
        text = next((text for text in self._texts if text[: len(self._known)] == self._known), [])
        proposals = text[start : start + max(0, min(most, self._most))]
        found = [token if self._random.random() < 5 / 6 else (token + 1) % 5 for token in proposals]
        return found, [1.0] * len(found)
