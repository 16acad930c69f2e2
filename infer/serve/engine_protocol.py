"""The interfaces of an engine that the server uses: `Engine` has it, and so has a fake in the tests."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from ...core.errors import WorkerDied
from ...text.tokenizer_files import TextFiles
from ..engine.grammar.compiler import Grammars
from ..engine.request.adapter_lease import AdapterLease
from ..engine.request.events import AdapterInfo, Event, ModelInfo
from ..engine.request.prompts import Encoder
from ..engine.request.request import Request
from ..engine.schedule.statistics import CacheReport, EngineLoad, EngineTotals


class TokenizerProtocol(Encoder, Protocol):
    """The part of a tokenizer that the server uses."""

    @property
    def files(self) -> TextFiles:
        """The files that it was read from, which may have a chat template."""

    @property
    def longest_token_bytes(self) -> int:
        """The bytes of the longest token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; ids unknown to the tokenizer give no text."""


class StatisticsProtocol(Protocol):
    """The statistics of an engine, and its cache, for any thread."""

    def load(self) -> EngineLoad:
        """Returns the load now."""

    def totals(self) -> EngineTotals:
        """Returns the totals since the start of the engine."""

    def flush_prefix_cache(self) -> int:
        """Forgets the prefix cache; returns how many of its blocks no request used."""

    def check_cache(self) -> CacheReport:
        """Counts the blocks of the cache, and looks for problems."""


class AdaptersProtocol(Protocol):
    """The adapters of an engine, for any thread."""

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The descriptions of the adapters that requests may ask for."""

    def hold(self, name: str, version: AdapterLease | None = None) -> AdapterLease:
        """Returns a hold on the adapter of a name: see `AdapterTable.hold`. Requests of a call have it as `version`."""

    def load(self, name: str, path: Path) -> AdapterInfo:
        """Loads an adapter and gives it a name, which another one may have; see `EngineAdapters.load`."""

    def unload(self, name: str) -> "tuple[AdapterInfo, Future[None]]":
        """Takes a name away. Returns the adapter's description, and what is done when its last request has ended."""


class EngineProtocol(Protocol):
    """An engine that begins to load the model; it runs requests on its own thread and reports them by events there."""

    def wait_ready(self) -> None:
        """Returns when the engine can compute; raises TkError if it cannot."""

    def close(self) -> None:
        """Ends the engine, from any thread; `wait_ready` then raises, if it still waits."""

    @property
    def info(self) -> ModelInfo:
        """The description of the served model."""

    @property
    def grammars(self) -> Grammars:
        """The grammars of constraints over the model's vocabulary."""

    @property
    def tokenizer(self) -> TokenizerProtocol | None:
        """The checkpoint's tokenizer, or None if it has none."""

    @property
    def statistics(self) -> StatisticsProtocol:
        """The load, and the blocks of the cache."""

    @property
    def adapters(self) -> AdaptersProtocol:
        """The loaded adapters, and the loading of others."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Submits a request, from any thread; raises InvalidRequest, UnknownAdapter, Overloaded or
        WorkerDied at once.

        The engine's thread calls `on_event` with each event, the last being Done or Failed; it must not block.
        """

    def abort(self, request_id: str, principal: str = "") -> bool:
        """Ends a principal's request, from any thread; its last event is Failed. Returns False if it is not live."""

    def after_events(self, callback: Callable[[], object]) -> None:
        """Registers a callback, which the engine's thread calls when it has sent all events that it has."""

    def watch(self, callback: Callable[[WorkerDied | None], None]) -> None:
        """Registers a callback, which the engine's thread calls with an error when a worker has died and all requests
        have failed, and, if the error has `retry_after`, with None when the workers have started again; also with
        WorkerStalled when workers hang, while requests wait, and with None when they answer again."""

    def kill(self) -> None:
        """Ends the workers at once, from any thread, whatever they compute: live requests fail with WorkerDied."""


class Reloads(Protocol):
    """Changes the weights that a server answers with; `ModelSwitch` does."""

    def reload(self, checkpoint: Path) -> ModelInfo:
        """Serves another checkpoint of the model from now on, and describes it; see `ModelSwitch.reload`."""

    def end_reloads(self) -> None:
        """Ends a reload that is under way, and refuses later ones; waits for neither."""
