"""A save that goes on while the script runs on: the next save or load, and the interpreter's end, wait for it."""

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from typing import Final

from ...core.errors import TkError
from ..health.flight_recorder import is_peer_loss

_ALONE_SECONDS: Final = 2.0

_log = logging.getLogger(__name__)


class SaveInFlight:
    """A save on a thread of its own, which then releases the run folder's lock.

    An interpreter that ends waits for the save. If it ends because other ranks were lost, perhaps without their parts
    of the save, it waits for 2 seconds only.

    Args:
        finish: returns once the save is done and the lock is released; raises the error of the save.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tk-save", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    def wait(self) -> None:
        """Returns once the save is done.

        Raises:
            TkError: the save failed, for a reason outside of tk.
        """
        self._thread.join()
        atexit.unregister(self._at_exit)
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # the thread's boundary: `wait` raises it
            self._error = error

    def _at_exit(self) -> None:
        failure = getattr(sys, "last_value", None)
        self._thread.join(_ALONE_SECONDS if failure is not None and is_peer_loss(failure) else None)
        if isinstance(self._error, TkError):
            _log.error("%s", self._error)
        elif self._error:
            _log.error("A save failed.", exc_info=self._error)
