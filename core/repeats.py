"""Things that happen again and again, of which a log shows one a minute, with the number of the others."""

import time
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

WINDOW: Final = 60.0  # seconds after a thing in which others of its kind are counted only
MOST_KINDS: Final = 1024  # that are counted apart; more of them count as one kind
_OTHERS: Final = "others"
T = TypeVar("T")


class Repeats(Generic[T]):
    """The kinds of things that were shown in the last minute; one thread at a time may use it.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown: dict[Hashable, float] = {}  # when a kind was shown, the oldest first
        self._held: dict[Hashable, tuple[T, int]] = {}  # the newest of a kind, and the number of those before it

    def see(self, kind: Hashable, thing: T) -> int | None:
        """Takes a thing, which is to be shown with the returned number of others before it that were not.

        Returns:
            None if it is not to be shown, as one of its kind was in the last minute.
        """
        if kind not in self._shown and len(self._shown) >= MOST_KINDS and not self._forget_oldest():
            kind = _OTHERS
        begun = self._shown.get(kind)
        _, held = self._held.get(kind, (None, -1))
        if begun is not None and self._clock() < begun + WINDOW:
            self._held[kind] = thing, held + 1
            return None
        self._show(kind)
        return held + 1

    def due(self, at_end: bool = False) -> list[tuple[T, int]]:
        """Returns the newest thing of each kind whose minute is over, or of all at the end, if it was not shown.

        Each comes with the number of others before it that were not shown either. They are to be shown now.
        """
        # A copy, since a finalizer that logs may interrupt this.
        over = [kind for kind in list(self._held) if at_end or self._clock() >= self._shown[kind] + WINDOW]
        things = [self._held[kind] for kind in over]
        for kind in over:
            self._show(kind)
        return things

    @property
    def is_holding(self) -> bool:
        """Whether there are things that were not shown."""
        return bool(self._held)

    def _show(self, kind: Hashable) -> None:
        self._held.pop(kind, None)
        self._shown.pop(kind, None)
        self._shown[kind] = self._clock()

    def _forget_oldest(self) -> bool:
        """Makes room for a kind; returns False if all were shown in the last minute or have things to show."""
        oldest = next(iter(self._shown))
        if oldest in self._held or self._clock() < self._shown[oldest] + WINDOW:
            return False
        del self._shown[oldest]
        return True
