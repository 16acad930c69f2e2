"""The adapters of a running engine: loaded at start or at any time later, unloaded, and loaded again by new workers."""

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from ...core.errors import Cancelled, ConfigError, TkError, WorkerDied
from ...core.given_paths import as_path
from .options import check_names
from .planning.adapter_source import AdapterSource
from .planning.adapter_table import AdapterTable, SlottedAdapter
from .planning.model_source import ModelSource
from .request.adapter_lease import AdapterLease
from .request.events import AdapterInfo
from .step_loop import StepLoop
from .worker.adapter_loaders import PackedOrder
from .worker.adapter_order import AdapterOrder
from .worker.worker_group import WorkerGroup

_LOG: Final = logging.getLogger(__name__)


class EngineAdapters:
    """The adapters of an engine, for any thread, but for the methods of its own.

    Attributes:
        table: the loaded adapters.

    Args:
        source: the served model.
        workers: the workers, which pack adapters beside their steps.
        loop: the loop that computes steps.
    """

    def __init__(self, source: ModelSource, workers: WorkerGroup, loop: StepLoop) -> None:
        memory, on_free = source.memory, partial(_free, workers, loop)  # without a cycle
        most = memory.max_adapters, memory.max_adapter_heads, memory.max_adapter_experts
        self.table = AdapterTable(*most, on_free)
        self._source, self._workers, self._loop = source, workers, loop
        self._turn = threading.Lock()  # of the load that has a slot and no name yet
        self._lock = threading.Lock()  # guards what follows
        self._waiting: Future[None] | None = None
        self._end: TkError | None = None

    @property
    def loaded(self) -> Mapping[str, AdapterSource]:
        """The adapters that requests may ask for, by name."""
        return self.table.loaded

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The descriptions of these adapters."""
        return self.table.infos

    def hold(self, name: str, version: AdapterLease | None = None) -> AdapterLease:
        """Returns a hold on the adapter of a name; see `AdapterTable.hold`."""
        return self.table.hold(name, version)

    def load(self, name: str, path: str | Path) -> AdapterInfo:
        """Loads an adapter, and gives it a name, which another one may have had; returns when requests can use it.

        Requests that use the other one end with it. Steps go on while the new one is checked, read and packed. Of
        several loads at a time each waits for those before it. A name that is unloaded meanwhile has the new adapter
        all the same.

        Raises:
            CheckpointError: see `AdapterSource.open`.
            ConfigError: the engine was started without places for adapters, or the name cannot be printed.
            Overloaded: see `AdapterTable.reserve`.
            StorageError: it cannot be read now, or not in time.
            WorkerDied, Cancelled: the workers have died, or the engine is closed.
        """
        check_names("adapters", (name,))
        if not self.table.max_named:
            raise ConfigError("The engine has no places for adapters: start it with max_adapters.")
        source = AdapterSource.open(as_path(path), self._source.checkpoint, self._source.config, self._source.memory)
        with self._turn:
            taken = self.table.reserve(name, source)
            try:
                self._put(taken, self._pack(taken.slot, source))
            except BaseException:
                self.table.drop(taken)
                raise
            self.table.give(name, taken)
        return source.info(name)

    def unload(self, name: str) -> "tuple[AdapterInfo, Future[None]]":
        """Takes a name away; the adapter's room is free when the last request that uses it has ended.

        Returns:
            The description of the adapter without requests, and what is done when there are none.

        Raises:
            UnknownAdapter: no loaded adapter has the name.
        """
        removed = self.table.remove(name)
        return removed.source.info(name), removed.unused

    def start(self) -> None:
        """Loads the adapters of the engine's options, on its thread, before the first step."""
        for name, source in self._source.adapters.items():
            taken = self.table.reserve(name, source)
            self._workers.put_adapter(self._pack(taken.slot, source))
            taken.is_loaded = True
            self.table.give(name, taken)

    def start_again(self) -> None:
        """Loads the adapters into new workers, on the engine's thread; those that cannot be read any more are lost."""
        for slot, source in self.table.in_slots.items():
            try:
                self._workers.put_adapter(self._pack(slot, source))
            except (WorkerDied, Cancelled):
                raise
            except TkError as error:
                lost = [name for name, each in self.loaded.items() if each is source]
                _LOG.warning("Adapter %s is lost: %s", ", ".join(lost), error)
                for name in lost:
                    self.table.remove(name)

    def end(self, error: TkError) -> None:
        """Fails the load that waits for a step's end, and later ones, when the engine's thread ends."""
        with self._lock:
            self._end = error
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_exception(error)

    def _pack(self, slot: int, source: AdapterSource) -> PackedOrder:
        """Lets all ranks read and pack an adapter for a slot."""
        config = self._source.config.model_dump(mode="json")
        order = AdapterOrder(slot, source.path, source.fingerprint, config)
        return self._workers.pack_adapter(order, self._source.options.start_timeout)

    def _put(self, adapter: SlottedAdapter, packed: PackedOrder) -> None:
        """Lets all ranks put a packed adapter into its slot, between two steps; one thread at a time calls this."""
        done = Future[None]()
        with self._lock:
            if self._end is not None:
                raise self._end
            self._waiting = done
        self._loop.between_steps(partial(self._put_now, adapter, packed, done))
        self._workers.wake()
        done.result()

    def _put_now(self, adapter: SlottedAdapter, packed: PackedOrder, done: "Future[None]") -> None:
        """Does so on the engine's thread."""
        try:
            self._workers.put_adapter(packed)
        except WorkerDied as error:
            done.set_exception(error)
        else:
            adapter.is_loaded = True
            done.set_result(None)


def _free(workers: WorkerGroup, loop: StepLoop, slot: int) -> None:
    """Lets the workers free a slot's memory, between two steps."""
    loop.between_steps(partial(workers.drop_adapter, slot))
    workers.wake()
