"""The attempts of a client's call: which errors deserve another one, when it comes, and how long all may take."""

import random
import time
from typing import Final

from ...core.errors import Overloaded, TkError
from .remote_errors import Unavailable

FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 5.0
# The part of a pause that is drawn: callers that were refused together must not come back together.
_DRAWN: Final = 0.5


class Attempts:
    """The attempts of one call, which begins now.

    Pauses double from attempt to attempt (exponential backoff with jitter) and are at least as long as the server asks.

    Args:
        most: the largest number of attempts.
        timeout: the seconds that all attempts and pauses together may take; None = no limit.
    """

    def __init__(self, most: int, timeout: float | None) -> None:
        self._left = most
        self._pause = FIRST_PAUSE_SECONDS
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def seconds_left(self) -> float | None:
        """The time until the call must be over, at least 0; None = no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def pause_after(self, error: TkError) -> float:
        """Returns the seconds to wait before the next attempt.

        Raises:
            TkError: the error itself, if no other attempt makes sense: another one would fail too, there were enough,
                or there is no time left for one.
        """
        self._left -= 1
        if self._left < 1 or not isinstance(error, (Overloaded, Unavailable)):
            raise error
        drawn = self._pause * (1 - _DRAWN * random.random())
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        asked = error.retry_after or 0.0
        pause = max(drawn, asked + _DRAWN * random.random() * min(asked, FIRST_PAUSE_SECONDS))
        if self._end is not None and time.monotonic() + pause >= self._end:
            raise error
        return pause
