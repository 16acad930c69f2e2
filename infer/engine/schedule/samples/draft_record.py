"""What a sample's proposals by a draft model have come to: how often they came true, and where its cache stands."""

from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 0.97  # the part of their weight that earlier tokens keep with every later one


@dataclass(slots=True)
class DraftRecord:
    """The record of one sample.

    Attributes:
        right, seen: how many of its proposals came true, of those that were checked; later ones weigh more.
        num_computed: the number of leading tokens whose keys the draft had when it was asked last.
    """

    right: float = 0.0
    seen: float = 0.0
    num_computed: int = 0
    _num_proposed: int = 0  # in the newest step
    _num_came: int = 0

    def propose(self, count: int) -> None:
        """Records that a step computes so many proposals."""
        self._num_proposed, self._num_came = count, 0

    def accept(self) -> None:
        """Records that one of them came true."""
        self._num_came += 1

    def learn(self) -> tuple[int, int, int]:
        """Takes the results of the newest step into account, once.

        Returns:
            How many were proposed, how many came true, and how many were checked: none behind the first wrong one.
        """
        proposed, right = self._num_proposed, self._num_came
        seen = right + (right < proposed)
        self._num_proposed = self._num_came = 0
        if seen:
            kept = _MEMORY**seen
            self.right, self.seen = kept * self.right + right, kept * self.seen + seen
        return proposed, right, seen

    def weaken(self, most: float) -> None:
        """Lets what it knows have at most the weight of so many tokens."""
        kept = min(1.0, most / self.seen) if self.seen else 1.0
        self.right, self.seen = kept * self.right, kept * self.seen
