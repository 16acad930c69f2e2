"""The adapters of the engine that is current, which change only while the weights of their base do not."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from ....core.errors import UnknownAdapter
from ...engine.request.events import AdapterInfo
from ..engine_protocol import AdaptersProtocol
from ..errors import Loading


class SwitchedAdapters:
    """The adapters of one engine after another: the next one begins with those that the one before had.

    Args:
        engines: returns the adapters of the engines now, first those of the one that answers new requests.
    """

    def __init__(self, engines: Callable[[], Sequence[AdaptersProtocol]]) -> None:
        self._engines = engines
        self._changed = threading.Condition()  # guards what follows
        self._num_changing = 0
        self._is_still = False

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The descriptions of the adapters that requests may ask for."""
        return self._engines()[0].infos

    def load(self, name: str, path: Path) -> AdapterInfo:
        """See `AdaptersProtocol.load`; raises Loading while other weights of the base are loaded."""
        with self._changing():
            return self._engines()[0].load(name, path)

    def unload(self, name: str) -> "tuple[AdapterInfo, Future[None]]":
        """Takes a name away, from an old engine too that finishes its requests; see `AdaptersProtocol.unload`.

        Raises:
            Loading: other weights of the base are loaded.
        """
        with self._changing():
            current, *old = self._engines()
            info, unused = current.unload(name)
            pending = [unused]
            for each in old:
                with suppress(UnknownAdapter):  # it was loaded after the change of weights
                    pending.append(each.unload(name)[1])
        return info, _all_done(pending)

    @contextmanager
    def still(self) -> Iterator[None]:
        """A time in which no adapter comes or goes; it begins when those that are being loaded are."""
        with self._changed:
            self._is_still = True
            self._changed.wait_for(lambda: not self._num_changing)
        try:
            yield
        finally:
            with self._changed:
                self._is_still = False

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._changed:
            if self._is_still:
                raise Loading("Other weights of the base are being loaded; change its adapters when they are.")
            self._num_changing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_changing -= 1
                self._changed.notify_all()


def _all_done(pending: "Sequence[Future[None]]") -> "Future[None]":
    """Returns what is done when all of some futures are, and cannot be cancelled."""
    if len(pending) == 1:
        return pending[0]
    first, *rest = pending
    done = Future[None]()
    done.set_running_or_notify_cancel()
    following = _all_done(rest)
    first.add_done_callback(lambda _: following.add_done_callback(lambda _: done.set_result(None)))
    return done
