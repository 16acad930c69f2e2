"""`tk serve RUN --follow`: newer steps of a run folder are served as they are committed."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from ....checkpoint.run.run_view import RunView
from ....core.errors import TkError
from ..errors import CannotReload, Draining

LOOK_SECONDS: Final = 1.0  # between two looks at the run folder
LAST_SECONDS: Final = 1.0  # for a look that ends with the server; one that waits for a dead disk is left alone
RETRY_SECONDS: Final = 30.0  # after a failure of the machine, such as a file that cannot be read now
_LOG: Final = logging.getLogger(__name__)


class ServedStep(Protocol):
    """What is served now."""

    @property
    def step(self) -> int:
        """Its training step."""


class RunWatcher:
    """The choice of the next step to serve: the newest one above all that were served, without the refused ones.

    Args:
        run: the run folder.
        step: the step that is served.
        reload: serves a step folder; raises TkError if it cannot.
        clock: the time, in seconds.
    """

    def __init__(
        self, run: Path, step: int, reload: Callable[[Path], ServedStep], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._step, self._reload, self._clock = RunView(run), step, reload, clock
        self._refused: dict[Path, int] = {}  # and when the folder had last changed
        self._not_before = 0.0

    def look(self) -> None:
        """Serves the next step, if there is one.

        A refused step is tried again only when its folder has changed; after another failure, looks pause.

        Raises:
            Draining: the server shuts down.
        """
        if self._clock() < self._not_before:
            return
        try:
            self._serve_next()
        except Draining:
            raise
        except (TkError, OSError) as error:
            self._not_before = self._clock() + RETRY_SECONDS
            _LOG.warning("%s Trying again in %.0f s.", error, RETRY_SECONDS)

    def _serve_next(self) -> None:
        for step, path in reversed(self._run.steps()):
            if step <= self._step:
                return
            try:
                changed = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue  # pruned since it was listed
            if self._refused.get(path) == changed:
                continue
            try:
                self._step = self._reload(path).step
                return
            except CannotReload as error:
                if not path.exists():
                    continue  # pruned while it was opened; the next look finds a newer one
                self._refused[path] = changed
                _LOG.warning("%s is not served. %s", path.name, error)


@contextmanager
def watching(watcher: RunWatcher) -> Iterator[None]:
    """Looks about once a second, on a thread of its own, until the block ends or the server shuts down."""
    over = threading.Event()

    def run() -> None:
        with suppress(Draining):
            while not over.wait(LOOK_SECONDS):
                watcher.look()

    thread = threading.Thread(target=run, name="tk-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LAST_SECONDS)
