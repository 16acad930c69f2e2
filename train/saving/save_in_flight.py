"""A save that goes on while the script does: waited for at the next save or load, and before the interpreter ends."""

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
    """Waits for a save on a thread of its own, which then gives back what the save needed (the run folder's lock).

    An interpreter that ends waits for it. If it ends because other ranks are gone, and with them perhaps their parts of
    the save, it does not wait for long.

    Args:
        finish: returns once the save is done; raises what became of it.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tk-save", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    def wait(self) -> None:
        """Returns once the save is done; raises what became of it, TkError where that can be caused from outside."""
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
