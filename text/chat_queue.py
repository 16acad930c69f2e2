"""The order in which conversations are rendered: no principal holds all places, however many conversations it has."""

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ChatQueue(Generic[T]):
    """Conversations that wait, and the number of those in progress, by principal.

    The next one is of the principal with the fewest in progress, and among such principals of the one that has waited
    longest for its turn; a principal's own keep their order.

    Args:
        most_each: the largest number of conversations of a principal in progress.
    """

    def __init__(self, most_each: int) -> None:
        self._most_each = most_each
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._in_progress: Counter[str] = Counter()

    def add(self, principal: str, conversation: T) -> None:
        """Adds a conversation behind the principal's others."""
        self._waiting.setdefault(principal, deque()).append(conversation)

    @property
    def can_take(self) -> bool:
        """Whether `take` would return a conversation."""
        return self._next() is not None

    def take(self) -> T | None:
        """Takes the next conversation, which is in progress until `end`; None if there is none."""
        principal = self._next()
        if principal is None:
            return None
        own = self._waiting.pop(principal)
        taken = own.popleft()
        if own:
            self._waiting[principal] = own  # behind the others
        self._in_progress[principal] += 1
        return taken

    def end(self, principal: str) -> None:
        """Records that one of a principal's conversations is no longer in progress."""
        self._in_progress[principal] -= 1
        if not self._in_progress[principal]:
            del self._in_progress[principal]

    def drain(self) -> list[T]:
        """Takes all that wait; none of them is in progress."""
        waiting, self._waiting = self._waiting, OrderedDict()
        return [conversation for own in waiting.values() for conversation in own]

    def _next(self) -> str | None:
        least = min(self._waiting, key=lambda principal: self._in_progress[principal], default=None)
        return None if least is None or self._in_progress[least] >= self._most_each else least
