"""The queue of waiting samples: higher priorities first, then fair shares between principals, then order of arrival.

No operation but iteration looks at every waiting sample.
"""

from collections.abc import Iterable, Iterator

from ..samples.sample import Sample
from .fair_share import FairShare
from .lazy_heap import LazyHeap


class _Line:
    """The waiting samples of one principal at one priority, in the order of arrival."""

    def __init__(self) -> None:
        self.samples: LazyHeap[Sample] = LazyHeap()
        self.num_tokens = 0


class _Level:
    """The waiting samples of one priority."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.turns: LazyHeap[str] = LazyHeap()  # principals; a key may be before the true one, never after it
        self.new_turns: LazyHeap[str] = LazyHeap()  # those of them whose first sample has not begun
        self.num_tokens = 0


class WaitQueue:
    """The waiting samples; `len` is their number.

    Args:
        shares: the virtual times of principals, which decide between them.
    """

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._levels: dict[int, _Level] = {}
        self._priorities: LazyHeap[int] = LazyHeap()
        self._num_tokens: dict[Sample, int] = {}  # those to compute, as counted in its line

    def __len__(self) -> int:
        return len(self._num_tokens)

    def __iter__(self) -> Iterator[Sample]:
        """Iterates over all waiting samples, in no particular order."""
        return iter(self._num_tokens)

    def push(self, sample: Sample) -> None:
        """Queues a sample; the tokens that it has to compute count as backlog."""
        level = self._levels.get(sample.request.priority)
        if level is None:
            level = self._levels[sample.request.priority] = _Level()
            self._priorities.push(sample.request.priority, -sample.request.priority)
        line = level.lines.get(sample.request.principal)
        if line is None:
            line = level.lines[sample.request.principal] = _Line()
        line.samples.push(sample, sample.order)
        self._count(sample, sample.num_uncomputed)
        if line.samples.first() is sample:
            self._assign_turn(level, sample)

    def discard(self, sample: Sample) -> None:
        """Removes a sample, if it waits."""
        if sample not in self._num_tokens:
            return
        level = self._levels[sample.request.priority]
        line = level.lines[sample.request.principal]
        self._count(sample, 0)
        del self._num_tokens[sample]
        line.samples.discard(sample)
        if (head := line.samples.first()) is None:
            level.turns.discard(sample.request.principal)
            level.new_turns.discard(sample.request.principal)
            del level.lines[sample.request.principal]
        elif head.has_begun == (sample.request.principal in level.new_turns):
            self._assign_turn(level, head)
        if not level.lines:
            self._priorities.discard(sample.request.priority)
            del self._levels[sample.request.priority]

    def first(self) -> Sample | None:
        """Returns the sample that is served next, or None."""
        return self._first(is_new=False)

    def first_new(self) -> Sample | None:
        """Returns the first of the same priority that has not begun, unless an older one of its principal has; or None.

        It may get a place sooner than the one that is served next: a first token hurries more than another one.
        """
        return self._first(is_new=True)

    def has(self, principal: str) -> bool:
        """Returns whether a sample of the principal waits."""
        return any(principal in level.lines for level in self._levels.values())

    def num_tokens(self, principal: str | None = None) -> int:
        """Returns how many tokens the waiting samples have to compute, or those of a principal."""
        if principal is None:
            return sum(level.num_tokens for level in self._levels.values())
        lines = (level.lines.get(principal) for level in self._levels.values())
        return sum(line.num_tokens for line in lines if line is not None)

    def backlog(self, sample: Sample, running: Iterable[Sample] = ()) -> int:
        """Returns an estimate of the tokens that are computed before those of a sample that is about to be queued.

        They are those of higher priorities, and of its own priority no more than the principal's fair share leaves: if
        the principal owns a fraction f of the weights, its queued tokens take 1 / f of their number.

        Args:
            running: the running ones, whose prompts count as if they waited.
        """
        request = sample.request
        first = sum(level.num_tokens for priority, level in self._levels.items() if priority > request.priority)
        level, same, own = self._levels.get(request.priority), 0, sample.num_uncomputed
        if level is not None:
            line = level.lines.get(request.principal)
            same, own = level.num_tokens, own + (line.num_tokens if line else 0)
        for other in running:
            count, priority = other.num_uncomputed, other.request.priority
            is_own = other.request.principal == request.principal
            if count == 1 or priority > request.priority or (is_own and priority < request.priority):
                first += count
            elif priority == request.priority:
                same, own = same + count, own + (count if is_own else 0)
        shared = own / self._shares.part(request.principal, request.weight) - sample.num_uncomputed
        return first + min(same, round(shared))

    def check_integrity(self) -> None:
        """Checks that the parts of the queue agree; raises AssertionError otherwise."""
        seen: list[Sample] = []
        assert set(self._priorities) == set(self._levels), "priorities and levels differ"
        for priority, level in self._levels.items():
            assert set(level.turns) == set(level.lines), "turns and lines differ"
            assert level.num_tokens == sum(line.num_tokens for line in level.lines.values()), "a level's tokens"
            for principal, line in level.lines.items():
                members = list(line.samples)
                seen += members
                assert members, "an empty line was kept"
                keys = {(sample.request.priority, sample.request.principal) for sample in members}
                assert keys == {(priority, principal)}, "a wrong line"
                assert line.num_tokens == sum(s.num_uncomputed for s in members), "a line's tokens"
                is_new = not min(members, key=lambda s: s.order).has_begun
                assert is_new == (principal in level.new_turns), "the turns of those that have not begun"
        assert len(seen) == len(self), "a sample is in two lines"
        assert set(seen) == set(self), "the lines hold other samples than the queue"

    def _first(self, is_new: bool) -> Sample | None:
        priority = self._priorities.first()
        if priority is None:
            return None
        level = self._levels[priority]
        turns = level.new_turns if is_new else level.turns
        while (principal := turns.first()) is not None:
            sample = level.lines[principal].samples.first()
            assert sample is not None, "an empty line has a turn"
            turn = self._turn(sample)
            if turns.key(principal) == turn:
                return sample
            turns.push(principal, turn)
        return None

    def _assign_turn(self, level: _Level, head: Sample) -> None:
        level.turns.push(head.request.principal, self._turn(head))
        if head.has_begun:
            level.new_turns.discard(head.request.principal)
        else:
            level.new_turns.push(head.request.principal, self._turn(head))

    def _turn(self, head: Sample) -> tuple[float, int, int]:
        return (self._shares.time(head.request.principal), head.arrival, head.index)

    def _count(self, sample: Sample, num_tokens: int) -> None:
        more = num_tokens - self._num_tokens.get(sample, 0)
        self._num_tokens[sample] = num_tokens
        level = self._levels[sample.request.priority]
        level.num_tokens += more
        level.lines[sample.request.principal].num_tokens += more
