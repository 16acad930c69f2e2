"""The policy of an engine whose workers die: it starts them again, a number of times."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from ....core.errors import Cancelled, TkError, WorkerDied

LEAST_SECONDS: Final = 1.0  # before a client should try again
Watcher = Callable[[WorkerDied | None], None]
_LOG: Final = logging.getLogger(__name__)


class Availability:
    """The callbacks that hear whether the workers of an engine compute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._watchers: list[Watcher] = []
        self._reported: WorkerDied | None = None

    def watch(self, callback: Watcher) -> None:
        """Registers a callback for later calls of `report`; calls it at once if the last one had an error."""
        with self._lock:
            self._watchers.append(callback)
            reported = self._reported
        if reported is not None:
            callback(reported)

    def report(self, error: WorkerDied | None) -> None:
        """Calls all callbacks: with the error while the workers are dead or stalled, with None if they compute."""
        with self._lock:
            self._reported = error
            watchers = tuple(self._watchers)
        for callback in watchers:
            callback(error)


def turn_with_restarts(
    turn: Callable[[], bool], start_again: Callable[[], float], refuse: Callable[[WorkerDied], None], most: int
) -> None:
    """Calls `turn` until it returns False; if workers die, starts them again.

    Args:
        turn: does a part of the work; raises WorkerDied if a worker has died.
        start_again: starts the workers again; returns the seconds that it took.
        refuse: ends the requests of the dead workers with the error, and refuses others with it until they are back.
        most: how often they are started again.

    Raises:
        WorkerDied: a worker has died once more.
        Cancelled: the engine was closed while they started.
    """
    restarts, seconds, is_up = 0, LEAST_SECONDS, True
    while True:
        try:
            if not is_up:
                seconds, is_up = max(LEAST_SECONDS, start_again()), True
            while turn():
                pass
            return
        except Cancelled:
            raise
        except TkError as error:
            if is_up and not isinstance(error, WorkerDied):  # no worker raised it, but this thread
                _LOG.error("The engine's thread failed.", exc_info=error)
            if restarts == most:
                raise error if isinstance(error, WorkerDied) else WorkerDied(str(error)) from error
            restarts, is_up = restarts + 1, False
            _LOG.warning("%s Restart %d of %d.", error, restarts, most)
            refuse(WorkerDied(f"{error} The workers start again.", seconds))
