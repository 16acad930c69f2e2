"""A priority queue with removal at any place, which all queues of the scheduler are made of.

A removed member stays in the heap until it comes to the front or half of the heap is such members, so no operation
looks at every member: the costs below are amortized over the operations before.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Final, Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)

_SPARE: Final = 16  # removed members that are never worth a rebuild


class LazyHeap(Generic[Member]):
    """Members in the order of their keys; members with equal keys keep the order of insertion."""

    def __init__(self) -> None:
        self._entries: dict[Member, tuple[Any, int, Member]] = {}
        self._heap: list[tuple[Any, int, Member]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: Member) -> bool:
        return member in self._entries

    def __iter__(self) -> Iterator[Member]:
        """Iterates over all members, in no particular order."""
        return iter(self._entries)

    def push(self, member: Member, key: Any) -> None:
        """Adds a member, or gives it another key; O(log N)."""
        self._num_pushed += 1
        entry = (key, self._num_pushed, member)
        self._entries[member] = entry
        heapq.heappush(self._heap, entry)
        self._rebuild_if_worth_it()

    def discard(self, member: Member) -> None:
        """Removes a member, if it is one; O(1)."""
        if self._entries.pop(member, None) is not None:
            self._rebuild_if_worth_it()

    def first(self) -> Member | None:
        """Returns the member with the lowest key, or None; O(log N)."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def key(self, member: Member) -> Any:
        """Returns the key of a member."""
        return self._entries[member][0]

    def _rebuild_if_worth_it(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
