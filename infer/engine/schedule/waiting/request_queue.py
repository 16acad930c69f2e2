"""The samples that are live and do not run: those that wait for a place, and those that wait for their prompt.

Of a request whose prompt is not computed yet one sample waits for a place, and the others for its blocks.
"""

from collections.abc import Iterable, Iterator

from ..samples.sample import Sample
from .fair_share import FairShare
from .lazy_heap import LazyHeap
from .wait_queue import WaitQueue


class RequestQueue:
    """The live samples: their order, their shares and their deadlines. `len` is the number of those that do not run.

    Attributes:
        shares: the virtual times of principals.
        waiting: the samples that wait for a place.
    """

    def __init__(self) -> None:
        self.shares = FairShare()
        self.waiting = WaitQueue(self.shares)
        # By arrival, the samples of a request whose prompt is not computed; the first one computes it.
        self._groups: dict[int, list[Sample]] = {}
        self._num_behind = 0  # samples of groups but the first ones
        self._deadlines: LazyHeap[Sample] = LazyHeap()

    def __len__(self) -> int:
        return len(self.waiting) + self._num_behind

    def __iter__(self) -> Iterator[Sample]:
        """Iterates over the samples that do not run, in no particular order."""
        yield from self.waiting
        for group in self._groups.values():
            yield from group[1:]

    def enter(self, samples: list[Sample]) -> None:
        """Queues the samples of a request."""
        for sample in samples:
            self.shares.enter(sample.request.principal, sample.request.weight)
            if sample.request.deadline is not None:
                self._deadlines.push(sample, sample.request.deadline)
        first, *others = samples
        self.waiting.push(first)
        if others:
            self._groups[first.arrival] = samples
            self._num_behind += len(others)

    def leave(self, sample: Sample) -> None:
        """Removes a sample that ends; if it was to compute a prompt for others, the next one waits in its place."""
        self.waiting.discard(sample)
        self._deadlines.discard(sample)
        group = self._groups.get(sample.arrival, [])
        if sample in group:
            if sample is group[0]:
                self.waiting.push(group[1])
            group.remove(sample)
            self._num_behind -= 1
            if len(group) == 1:
                del self._groups[sample.arrival]
        self.shares.leave(sample.request.principal)

    def release_group(self, first: Sample) -> bool:
        """Lets the other samples of a request wait, whose prompt a sample has computed; False: there are none."""
        _, *others = self._groups.pop(first.arrival, [first])
        self._num_behind -= len(others)
        for other in others:
            self.waiting.push(other)
        return bool(others)

    def first_expired(self, now: float) -> Sample | None:
        """Returns the sample with the earliest deadline, if that is not after `now`, whatever its state."""
        first = self._deadlines.first()
        return first if first is not None and self._deadlines.key(first) <= now else None

    def check_integrity(self, live: Iterable[Sample]) -> None:
        """Checks that the parts agree about all live samples; raises AssertionError otherwise."""
        self.waiting.check_integrity()
        counts: dict[str, int] = {}
        for sample in live:
            counts[sample.request.principal] = counts.get(sample.request.principal, 0) + 1
        assert set(self._deadlines) == {s for s in live if s.request.deadline is not None}, "deadlines of others"
        assert self.shares.num_live() == counts, "the shares count other samples"
