"""The queue of waiting sequences: higher priorities first, then fair shares between principals, then order of arrival.

No operation but iteration looks at every waiting sequence.
"""

from collections.abc import Iterable, Iterator

from ..samples.sequence import Sequence
from .fair_share import FairShare
from .lazy_heap import LazyHeap


class _Line:
    """The waiting sequences of one principal at one priority, in the order of arrival."""

    def __init__(self) -> None:
        self.sequences: LazyHeap[Sequence] = LazyHeap()
        self.num_tokens = 0


class _Level:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.turns: LazyHeap[str] = LazyHeap()  # principals; a key may be before the true one, never after it
        self.new_turns: LazyHeap[str] = LazyHeap()  # those of them whose first sequence has not begun
        self.num_tokens = 0


class WaitQueue:
    """The waiting sequences; `len` is their number.

    Args:
        shares: the virtual times of principals, which decide between them.
    """

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._levels: dict[int, _Level] = {}
        self._priorities: LazyHeap[int] = LazyHeap()
        self._num_tokens: dict[Sequence, int] = {}  # those to compute, as counted in its line

    def __len__(self) -> int:
        return len(self._num_tokens)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over all waiting sequences, in no particular order."""
        return iter(self._num_tokens)

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence; the tokens that it has to compute count as backlog."""
        level = self._levels.get(sequence.priority)
        if level is None:
            level = self._levels[sequence.priority] = _Level()
            self._priorities.push(sequence.priority, -sequence.priority)
        line = level.lines.get(sequence.principal)
        if line is None:
            line = level.lines[sequence.principal] = _Line()
        line.sequences.push(sequence, sequence.order)
        self._count(sequence, sequence.num_uncomputed)
        if line.sequences.first() is sequence:
            self._give_turn(level, sequence)

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence, if it waits."""
        if sequence not in self._num_tokens:
            return
        level = self._levels[sequence.priority]
        line = level.lines[sequence.principal]
        self._count(sequence, 0)
        del self._num_tokens[sequence]
        line.sequences.discard(sequence)
        if (head := line.sequences.first()) is None:
            level.turns.discard(sequence.principal)
            level.new_turns.discard(sequence.principal)
            del level.lines[sequence.principal]
        elif head.has_begun == (sequence.principal in level.new_turns):
            self._give_turn(level, head)
        if not level.lines:
            self._priorities.discard(sequence.priority)
            del self._levels[sequence.priority]

    def first(self) -> Sequence | None:
        """Returns the sequence that is served next, or None."""
        priority = self._priorities.first()
        if priority is None:
            return None
        level = self._levels[priority]
        return self._first(level, level.turns)

    def first_new(self) -> Sequence | None:
        """Returns the first of the same priority that has not begun, unless an older one of its principal has; or None.

        It may get a place sooner than the one that is served next: a first token hurries more than another one.
        """
        priority = self._priorities.first()
        if priority is None:
            return None
        level = self._levels[priority]
        return self._first(level, level.new_turns)

    def has(self, principal: str) -> bool:
        """Returns whether a sequence of the principal waits."""
        return any(principal in level.lines for level in self._levels.values())

    def num_tokens(self, principal: str | None = None) -> int:
        """Returns how many tokens the waiting sequences have to compute, or those of a principal."""
        if principal is None:
            return sum(level.num_tokens for level in self._levels.values())
        lines = (level.lines.get(principal) for level in self._levels.values())
        return sum(line.num_tokens for line in lines if line is not None)

    def backlog(self, sequence: Sequence, running: Iterable[Sequence] = ()) -> int:
        """Returns an estimate of the tokens that are computed before those of a sequence that is about to be queued.

        They are those of higher priorities, and of its own priority no more than the principal's fair share leaves: if
        the principal owns a fraction f of the weights, its queued tokens take 1 / f of their number.

        Args:
            sequence: the sequence.
            running: the running ones, whose prompts count as if they waited.
        """
        first = sum(level.num_tokens for priority, level in self._levels.items() if priority > sequence.priority)
        level, same, own = self._levels.get(sequence.priority), 0, sequence.num_uncomputed
        if level is not None:
            line = level.lines.get(sequence.principal)
            same, own = level.num_tokens, own + (line.num_tokens if line else 0)
        for other in running:
            count, is_own = other.num_uncomputed, other.principal == sequence.principal
            if count == 1 or other.priority > sequence.priority or (is_own and other.priority < sequence.priority):
                first += count
            elif other.priority == sequence.priority:
                same, own = same + count, own + (count if is_own else 0)
        shared = own / self._shares.part(sequence.principal, sequence.weight) - sequence.num_uncomputed
        return first + min(same, round(shared))

    def check_integrity(self) -> None:
        """Checks that the parts of the queue agree; raises AssertionError otherwise."""
        seen: list[Sequence] = []
        assert set(self._priorities) == set(self._levels), "priorities and levels differ"
        for priority, level in self._levels.items():
            assert set(level.turns) == set(level.lines), "turns and lines differ"
            assert level.num_tokens == sum(line.num_tokens for line in level.lines.values()), "a level's tokens"
            for principal, line in level.lines.items():
                members = list(line.sequences)
                seen += members
                assert members, "an empty line was kept"
                assert all((s.priority, s.principal) == (priority, principal) for s in members), "a wrong line"
                assert line.num_tokens == sum(s.num_uncomputed for s in members), "a line's tokens"
                is_new = not min(members, key=lambda s: s.order).has_begun
                assert is_new == (principal in level.new_turns), "the turns of those that have not begun"
        assert len(seen) == len(self), "a sequence is in two lines"
        assert set(seen) == set(self), "the lines hold other sequences than the queue"

    def _first(self, level: _Level, turns: LazyHeap[str]) -> Sequence | None:
        while (principal := turns.first()) is not None:
            sequence = level.lines[principal].sequences.first()
            assert sequence is not None, "an empty line has a turn"
            turn = self._turn(sequence)
            if turns.key(principal) == turn:
                return sequence
            turns.push(principal, turn)
        return None

    def _give_turn(self, level: _Level, head: Sequence) -> None:
        level.turns.push(head.principal, self._turn(head))
        if head.has_begun:
            level.new_turns.discard(head.principal)
        else:
            level.new_turns.push(head.principal, self._turn(head))

    def _turn(self, head: Sequence) -> tuple[float, int, int]:
        return (self._shares.time(head.principal), head.arrival, head.index)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        more = num_tokens - self._num_tokens.get(sequence, 0)
        self._num_tokens[sequence] = num_tokens
        level = self._levels[sequence.priority]
        level.num_tokens += more
        level.lines[sequence.principal].num_tokens += more
