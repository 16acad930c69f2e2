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
from .request.events import AdapterInfo
from .step_loop import StepLoop
from .worker.adapter_order import AdapterOrder
from .worker.worker_group import WorkerGroup

_LOG: Final = logging.getLogger(__name__)


class EngineAdapters:
    """The adapters of an engine, for any thread, but for the methods of its own.

    Attributes:
        table: the loaded adapters.

    Args:
        source: the served model.
        workers: the workers, which load adapters between two steps.
        loop: the loop that computes steps.
    """

    def __init__(self, source: ModelSource, workers: WorkerGroup, loop: StepLoop) -> None:
        memory = source.memory
        self.table = AdapterTable(memory.max_adapters, memory.max_adapter_heads, memory.max_adapter_experts)
        self._source, self._workers, self._loop = source, workers, loop
        self._lock = threading.Lock()  # guards what follows
        self._pending: set[Future[None]] = set()
        self._end: TkError | None = None

    @property
    def loaded(self) -> Mapping[str, AdapterSource]:
        """The adapters that requests may ask for, by name."""
        return self.table.loaded

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The descriptions of these adapters."""
        return self.table.infos

    def load(self, name: str, path: str | Path) -> AdapterInfo:
        """Loads an adapter, and gives it a name, which another one may have had; returns when requests can use it.

        Requests that use the other one end with it. The workers compute no step while they load.

        Raises:
            CheckpointError: see `AdapterSource.open`.
            ConfigError: the engine was started without places for adapters, or the name cannot be printed.
            Overloaded: all slots are taken.
            WorkerDied, Cancelled: the workers have died, or the engine is closed.
        """
        check_names("adapters", (name,))
        if not self.table.num_slots:
            raise ConfigError("The engine has no places for adapters: start it with max_adapters.")
        source = AdapterSource.open(as_path(path), self._source.checkpoint, self._source.config, self._source.memory)
        taken, done = self.table.reserve(source), Future[None]()
        try:
            with self._lock:
                if self._end is not None:
                    raise self._end
                self._pending.add(done)
            self._loop.between_steps(partial(self._load_now, taken, done))
            self._workers.wake()
            done.result()
        except BaseException:
            self.table.drop(taken)
            raise
        finally:
            with self._lock:
                self._pending.discard(done)
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
            taken = self.table.reserve(source)
            self._load_into(taken.slot, source)
            self.table.give(name, taken)

    def start_again(self) -> None:
        """Loads the adapters into new workers, on the engine's thread; those that cannot be read any more are lost."""
        for slot, source in self.table.in_slots.items():
            try:
                self._load_into(slot, source)
            except (WorkerDied, Cancelled):
                raise
            except TkError as error:
                lost = [name for name, each in self.loaded.items() if each is source]
                _LOG.warning("Adapter %s is lost: %s", ", ".join(lost), error)
                for name in lost:
                    self.table.remove(name)

    def end(self, error: TkError) -> None:
        """Fails the loads that wait, and later ones, when the engine's thread ends."""
        with self._lock:
            self._end = error
            for done in self._pending:
                if not done.done():
                    done.set_exception(error)

    def _load_now(self, adapter: SlottedAdapter, done: "Future[None]") -> None:
        try:
            self._load_into(adapter.slot, adapter.source)
        except TkError as error:
            done.set_exception(error)
            if isinstance(error, WorkerDied | Cancelled):
                raise
        else:
            done.set_result(None)

    def _load_into(self, slot: int, source: AdapterSource) -> None:
        config = self._source.config.model_dump(mode="json")
        order = AdapterOrder(slot, source.path, source.fingerprint, config)
        self._workers.load_adapter(order, self._source.options.start_timeout)
