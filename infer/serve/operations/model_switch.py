"""One served engine after another: another step of the model is loaded beside the running one, and then served."""

import logging
import threading
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

from ....core.errors import StorageError, TkError, WorkerDied
from ...engine.grammar.compiler import Grammars
from ...engine.request.events import Done, Event, Failed, ModelInfo
from ...engine.request.request import CacheOptions, Request
from ...engine.request.sampling_params import SamplingParams
from ..engine_protocol import EngineProtocol, TokenizerProtocol
from ..errors import CannotReload, Draining
from .merged_statistics import MergedStatistics
from .switched_adapters import SwitchedAdapters

_LOG: Final = logging.getLogger(__name__)


class SwitchableEngine(EngineProtocol, Protocol):
    """An engine that another one can replace."""

    @property
    def num_live(self) -> int:
        """The number of requests that are waiting or running."""


E = TypeVar("E", bound=SwitchableEngine)


class ModelSwitch(Generic[E]):
    """An engine for the server, which is the newest of a row of engines; `reload` adds one.

    At most two have their weights in memory: the current one, and either one that loads or an old one that finishes the
    requests that it began with. A request is answered by one engine, whose cache no other engine has.

    Args:
        first: the first engine, which may be loading.
        begin_next: begins to load a checkpoint beside a running engine, and returns the engine, or None if the running
            one serves this checkpoint already; raises TkError if it cannot be served.
    """

    def __init__(self, first: E, begin_next: Callable[[E, Path], E | None]) -> None:
        self._begin_next = begin_next
        self._watchers: list[Callable[[WorkerDied | None], None]] = []
        self._after_events: list[Callable[[], object]] = []
        self._changed = threading.Condition(threading.RLock())  # guards all below; taken before an engine's lock
        self._current: E = first
        self._loading: E | None = None
        self._retiring: E | None = None
        self._is_busy = False  # there are, or soon will be, two sets of weights
        self._waiting: object | None = None  # the reload that comes next
        self._is_ending = False
        self._death: WorkerDied | None = None  # of the current engine
        self.statistics = MergedStatistics(self._engines, self._changed)
        self.adapters = SwitchedAdapters(lambda: [engine.adapters for engine in self._engines()])
        self._attach(first)
        self._watch(first)

    @property
    def info(self) -> ModelInfo:
        """The description of the model, with the step that new requests are answered by."""
        return self._current.info

    @property
    def grammars(self) -> Grammars:
        """The grammars of constraints over the model's vocabulary, which is that of every step."""
        return self._current.grammars

    @property
    def tokenizer(self) -> TokenizerProtocol | None:
        """The tokenizer, which is that of every step; None if the checkpoint has none."""
        return self._current.tokenizer

    def wait_ready(self) -> None:
        """Returns when the first engine can compute; raises TkError if it cannot."""
        self._current.wait_ready()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Submits a request to the current engine; see `EngineProtocol`."""
        with self._changed:  # an engine retires only between two submissions
            self._current.submit(request, on_event)

    def abort(self, request_id: str, principal: str = "") -> bool:
        """Ends a principal's request in the engine that has it; False: it is not live."""
        return any(engine.abort(request_id, principal) for engine in self._engines())

    def after_events(self, callback: Callable[[], object]) -> None:
        """Registers a callback for the thread of every engine; see `EngineProtocol`."""
        self._after_events.append(callback)

    def watch(self, callback: Callable[[WorkerDied | None], None]) -> None:
        """Registers a callback for deaths of the current engine's workers, and their end; see `EngineProtocol`."""
        with self._changed:
            self._watchers.append(callback)
            if self._death is not None:
                callback(self._death)

    def reload(self, checkpoint: Path) -> ModelInfo:
        """Loads another checkpoint of the model and serves it from now on; the thread of the caller waits.

        While a reload is under way, or an old engine has requests, one reload waits: the newest.

        Returns:
            The description of the model with that checkpoint.

        Raises:
            CannotReload: the checkpoint is damaged, of another model, too large to be loaded beside the running one, or
                a newer reload came. The running one serves on, here and below.
            StorageError, WorkerDied: it cannot be read now, or a worker died that loaded it.
            Draining: the server shuts down.
        """
        running = self._wait_for_turn()
        is_switched = False
        try:
            with self.adapters.still():
                engine = self._load(running, checkpoint)
                if engine is not None:
                    self._switch_to(engine)
                    is_switched = True
        except TkError as error:
            if self._is_ending:
                raise _draining() from error
            if isinstance(error, StorageError | WorkerDied):
                raise
            raise CannotReload(f"Step {running.info.step} serves on: {error}") from error
        finally:
            if not is_switched:  # else the turn ends when the old engine has
                self._end_turn()
        return (engine or running).info

    def end_reloads(self) -> None:
        """Ends an engine that loads, and refuses later reloads; the current and an old one go on. Waits for nothing."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            loading = self._loading
        if loading is not None:
            loading.kill()

    def kill(self) -> None:
        """Ends the workers of all engines at once; see `EngineProtocol`."""
        for engine in self._engines():
            engine.kill()
        self.end_reloads()

    def close(self) -> None:
        """Ends all engines, from any thread; their live requests fail with Cancelled."""
        self.end_reloads()
        with self._changed:  # a later engine that loads is closed by its own thread, which sees that all ends
            loading = () if self._loading is None else (self._loading,)
        for engine in (*loading, *self._engines()):
            engine.close()

    def _engines(self) -> tuple[E, ...]:
        """Returns the current engine, and the old one if it has not ended."""
        with self._changed:
            return (self._current,) if self._retiring is None else (self._current, self._retiring)

    def _wait_for_turn(self) -> E:
        """Returns the current engine when a second one may be loaded."""
        turn = object()
        with self._changed:
            self._waiting = turn
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_ending or self._waiting is not turn or not self._is_busy)
            if self._is_ending:
                raise _draining()
            if self._waiting is not turn:
                raise CannotReload("A newer reload took the place of this one.")
            self._waiting, self._is_busy = None, True
            return self._current

    def _end_turn(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()

    def _load(self, running: E, checkpoint: Path) -> E | None:
        engine = self._begin_next(running, checkpoint)
        if engine is None:
            return None
        with self._changed:
            self._loading = engine
            is_ending = self._is_ending
        try:
            if is_ending:
                raise _draining()
            engine.wait_ready()
            warm_up(engine)
        except BaseException:
            engine.close()
            raise
        finally:
            with self._changed:
                self._loading = None
        return engine

    def _switch_to(self, engine: E) -> None:
        self._attach(engine)
        with self._changed:
            old = self._current
            is_ending = self._is_ending
            if not is_ending:
                self._current, self._retiring = engine, old
                if self._death is not None:
                    self._report(engine, None)
                self._watch(engine)
        if is_ending:
            engine.close()
            raise _draining()
        _LOG.info("step %d is served; step %d has %d requests", engine.info.step, old.info.step, old.num_live)
        threading.Thread(target=self._retire, args=(old,), name="tk-retire", daemon=True).start()

    def _retire(self, old: E) -> None:
        """Closes an old engine when its last request has ended."""
        with self._changed:
            self._changed.wait_for(lambda: old.num_live == 0)
        old.close()
        with self._changed:
            self._retiring = None
            self.statistics.add_ended(old.statistics.totals())
        self._end_turn()

    # An engine has the callbacks below, so these have no engine: one that has ended goes without a search for garbage.

    def _attach(self, engine: E) -> None:
        weak = weakref.ref(engine)
        engine.after_events(lambda: self._events_sent(weak()))

    def _watch(self, engine: E) -> None:
        weak = weakref.ref(engine)
        engine.watch(lambda error: self._report(weak(), error))

    def _events_sent(self, engine: E | None) -> None:
        for callback in self._after_events:
            callback()
        if engine is not None and engine is self._retiring:
            with self._changed:
                self._changed.notify_all()

    def _report(self, engine: E | None, error: WorkerDied | None) -> None:
        with self._changed:
            if engine is not self._current:
                return
            self._death = error
            for callback in self._watchers:
                callback(error)


def _draining() -> Draining:
    return Draining("The server is shutting down and loads no other weights.")


_ONE_TOKEN: Final = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)


def warm_up(engine: EngineProtocol) -> None:
    """Computes one token, so that the first caller does not wait for what happens only once; the thread waits.

    Raises:
        TkError: the engine cannot answer.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    engine.submit(Request((0,), _ONE_TOKEN, uuid.uuid4().hex, cache=CacheOptions(bypass=True)), events.put)
    while not isinstance(event := events.get(), Done | Failed):
        pass
    if isinstance(event, Failed):
        raise event.error
