"""The adapters of the engine that is current, which change only while the weights of their base do not."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from ...engine.request.adapter_lease import AdapterLease
from ...engine.request.events import AdapterInfo
from ..engine_protocol import AdaptersProtocol
from ..errors import Loading


class SwitchedAdapters:
    """The adapters of one engine after another: the next one begins with those that the one before had.

    Args:
        current: returns the adapters of the engine that answers new requests.
    """

    def __init__(self, current: Callable[[], AdaptersProtocol]) -> None:
        self._current = current
        self._changed = threading.Condition()  # guards what follows
        self._num_changing = 0
        self._is_still = False

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The descriptions of the adapters that requests may ask for."""
        return self._current().infos

    def hold(self, name: str, version: AdapterLease | None = None) -> AdapterLease:
        """See `AdaptersProtocol.hold`."""
        return self._current().hold(name, version)

    def load(self, name: str, path: Path) -> AdapterInfo:
        """See `AdaptersProtocol.load`; raises Loading while other weights of the base are loaded."""
        with self._changing():
            return self._current().load(name, path)

    def unload(self, name: str) -> "tuple[AdapterInfo, Future[None]]":
        """See `AdaptersProtocol.unload`; raises Loading while other weights of the base are loaded."""
        with self._changing():
            return self._current().unload(name)

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
