"""The samples that are live and do not run: those that wait for a place, and those that wait for their prompt.

Of a request whose prompt is not computed yet one sample leads, and the others wait for its blocks.
"""

from collections.abc import Iterable, Iterator

from ..samples.sample import Sample
from .fair_share import FairShare
from .lazy_heap import LazyHeap
from .wait_queue import WaitQueue


class SampleGroups:
    """The samples behind a leader; `len` is their number. No operation looks at other requests' samples."""

    def __init__(self) -> None:
        self._members: dict[Sample, list[Sample]] = {}  # by their leaders
        self._leaders: dict[Sample, Sample] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def __iter__(self) -> Iterator[Sample]:
        """Iterates over all samples but the leaders, in no particular order."""
        return iter(self._leaders)

    def add(self, samples: list[Sample]) -> None:
        """Groups the samples of a request behind the first one."""
        leader, *members = samples
        if members:
            self._members[leader] = members
            self._leaders.update(dict.fromkeys(members, leader))

    def part(self, leader: Sample) -> list[Sample]:
        """Returns the samples behind a leader, which are in no group any more; none if it leads no group."""
        members = self._members.pop(leader, [])
        for member in members:
            del self._leaders[member]
        return members

    def leave(self, sample: Sample) -> Sample | None:
        """Takes a sample out of its group, if it has one.

        Returns:
            The sample that leads from now on, if this one led.
        """
        leader = self._leaders.pop(sample, None)
        if leader is not None:
            self._members[leader].remove(sample)
            return None
        members = self.part(sample)
        if not members:
            return None
        self.add(members)
        return members[0]


class RequestQueue:
    """The live samples: their order, their shares and their deadlines. `len` is the number of those that do not run.

    Attributes:
        shares: the virtual times of principals.
        waiting: the samples that wait for a place.
    """

    def __init__(self) -> None:
        self.shares = FairShare()
        self.waiting = WaitQueue(self.shares)
        self._groups = SampleGroups()
        self._deadlines: LazyHeap[Sample] = LazyHeap()

    def __len__(self) -> int:
        return len(self.waiting) + len(self._groups)

    def __iter__(self) -> Iterator[Sample]:
        """Iterates over the samples that do not run, in no particular order."""
        yield from self.waiting
        yield from self._groups

    def enter(self, samples: list[Sample]) -> None:
        """Queues the samples of a request."""
        for sample in samples:
            self.shares.enter(sample.request.principal, sample.request.weight)
            if sample.request.deadline is not None:
                self._deadlines.push(sample, sample.request.deadline)
        self._groups.add(samples)
        self.waiting.push(samples[0])

    def leave(self, sample: Sample) -> None:
        """Removes a sample that ends; if it led a group, the next one waits in its place."""
        self.waiting.discard(sample)
        self._deadlines.discard(sample)
        if leader := self._groups.leave(sample):
            self.waiting.push(leader)
        self.shares.leave(sample.request.principal)

    def release_group(self, leader: Sample) -> bool:
        """Lets all samples behind a leader wait for places, now that its prompt is computed; False: there are none."""
        members = self._groups.part(leader)
        for member in members:
            self.waiting.push(member)
        return bool(members)

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
