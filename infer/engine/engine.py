"""The engine: it accepts requests from any thread, plans every step, lets the workers compute it and sends the events.

The engine does not import torch: the worker processes (`worker.py`) hold the model. One thread owns the workers and
runs `StepLoop`; `LiveTable` has what it shares with submitting threads.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Self

from ...core.defects import known_or_defect
from ...core.errors import Cancelled, TkError, WorkerDied
from ...core.home_process import HomeProcess
from ...text.tokenizer import Tokenizer
from .engine_adapters import EngineAdapters
from .grammar.compiler import Grammars
from .options import EngineOptions
from .planning.memory_plan import MemoryPlan
from .planning.model_source import ModelSource
from .request.events import Event, ModelInfo
from .request.request import Request, check_servable, with_grammar
from .schedule.live_request import LiveRequest
from .schedule.live_table import LiveTable
from .schedule.proposing.draft_policy import DraftPolicy
from .schedule.scheduler import Scheduler
from .schedule.statistics import EngineStatistics
from .schedule.waiting.admission import Limits
from .step_loop import StepLoop
from .worker.draft_model import DraftModel
from .worker.processes import WorkerProcesses
from .worker.restarts import Availability, Watcher, turn_with_restarts
from .worker.step_timing import measure_draft, measure_steps
from .worker.step_watch import StepWatch
from .worker.worker_group import WorkerGroup

OnPlan = Callable[[ModelInfo, MemoryPlan], None]


class Engine:
    """A served model; `Engine.start` makes it. A new one begins to load: `wait_ready` must follow.

    Attributes:
        home: the process that made it; in a fork `close` does nothing, and other calls are refused.
        info: the description of the model.
        source: the opened checkpoint, and the decisions about serving it.
        statistics: the load, and the blocks of the cache.
        adapters: the loaded adapters, and the loading of others.
    """

    def __init__(self, source: ModelSource, processes: WorkerProcesses) -> None:
        options, memory = source.options, source.memory
        self.home = HomeProcess("This engine, of an LLM or a server,")
        self.info = source.info
        self.source = source
        self._arrivals = itertools.count()
        limits, lock = Limits.of(options, memory.max_model_len), threading.Lock()
        scheduler = Scheduler(limits, memory.num_blocks, memory.block_size, memory.num_twins)
        of_draft = (memory.draft.weight_bytes, memory.draft.kv_bytes) if memory.draft else (0, 0)
        self.statistics = EngineStatistics(scheduler, lock, of_draft)
        self._live = LiveTable(scheduler, lock, by_adapter=memory.max_adapters > 0)
        self._availability = Availability()
        watch = StepWatch(options.step_timeout, self._availability.report)
        draft = _draft_of(source, scheduler, self._availability.report)
        beside = None if draft is None else draft.workers
        self._workers = WorkerGroup(processes, watch, self._live.end_unwanted, beside)
        self._loop = StepLoop(self._live, self._workers, draft)
        self.adapters = EngineAdapters(source, self._workers, self._loop)
        self._ready: Future[str] = Future()  # the kernels of the workers
        self._thread = threading.Thread(target=self._run, args=(scheduler,), name="tk-engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls, options: EngineOptions, on_plan: OnPlan = lambda info, plan: None, processes: WorkerProcesses | None = None
    ) -> Self:
        """Plans memory, starts the workers, and returns when they have loaded the model.

        Args:
            on_plan: is called with the model's description and the memory plan, before anything is allocated.
            processes: the workers' processes, which the engine ends, also if this method raises; None = new ones.

        Raises:
            ConfigError: the options contradict each other or do not fit the model.
            ParallelError: tp does not divide the model.
            CheckpointError: the checkpoint cannot be used.
            WorkerDied: a worker ended without reporting an error.
        """
        engine = cls.begin(options, on_plan, processes)
        engine.wait_ready()
        return engine

    @classmethod
    def begin(
        cls, options: EngineOptions, on_plan: OnPlan = lambda info, plan: None, processes: WorkerProcesses | None = None
    ) -> Self:
        """Does the first half of `start`: returns while the workers load the model. `wait_ready` must follow."""
        try:
            options.validate()
            # They import their modules while this process opens the checkpoint.
            processes = processes or WorkerProcesses(options.tp, options.threads_per_rank)
            source = ModelSource.open(options)
            on_plan(source.info, source.memory)
            return cls(source, processes)
        except BaseException:
            if processes is not None:
                processes.close()
            raise

    def wait_ready(self) -> None:
        """Returns when the workers have loaded the model; if it raises as `start` does, the engine is closed."""
        try:
            self.info = replace(self.info, kernels=self._ready.result())
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None if the checkpoint has no tokenizer.json."""
        return self.source.tokenizer

    @property
    def grammars(self) -> Grammars:
        """The grammars of constraints over the model's vocabulary."""
        return self.source.grammars

    @property
    def num_live(self) -> int:
        """The number of requests that are waiting or running."""
        return len(self._live)

    @property
    def worker_process_ids(self) -> tuple[int, ...]:
        """The process ids of the workers, in rank order."""
        return self._workers.process_ids

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Submits a request, from any thread.

        Args:
            on_event: is called with each event on the engine's thread, the last being Done or Failed; it must neither
                block nor raise.

        Raises:
            InvalidRequest: a value cannot be served, or another live request has the request id.
            PromptTooLong: prompt and new tokens can never fit.
            DeadlinePassed: the first token is not expected before the deadline.
            Overloaded: the queue is full.
            UnknownAdapter: the request is for an adapter that is not loaded.
            WorkerDied: a worker has died.
            Cancelled: the engine is closed.
        """
        self.home.require()
        check_servable(request, self.info, self.tokenizer is not None)
        request = with_grammar(request, self.grammars)
        lease = self.adapters.hold(request.adapter, request.version) if request.adapter else None
        try:
            live = LiveRequest(replace(request, lease=lease), next(self._arrivals), self.source, on_event)
            self._live.add(live)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        self._workers.wake()

    def abort(self, request_id: str, principal: str = "") -> bool:
        """Ends a principal's request, from any thread; its last event is Failed(Cancelled). False: it is not live."""
        if not self._live.cancel((principal, request_id)):
            return False
        self._workers.wake()  # also while the workers compute, or hang
        return True

    def watch(self, callback: Watcher) -> None:
        """Registers a callback, which the engine's thread calls with an error when a worker has died and all requests
        have failed. If the error has `retry_after`, it calls it with None when the workers have started again. It also
        calls it with WorkerStalled when workers hang, while requests wait, and with None when they answer again."""
        self._availability.watch(callback)

    def after_events(self, callback: Callable[[], object]) -> None:
        """Registers a callback, which the engine's thread calls when it has sent all events that it has."""
        self._live.after_events.append(callback)

    def close(self) -> None:
        """Ends live requests with Cancelled, and the workers, from any thread; a second call does nothing."""
        if not self.home.is_here:
            return
        self._live.close()
        for workers in self._groups:
            workers.wake(closing=True)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def kill(self) -> None:
        """Ends the workers at once, from any thread, whatever they compute: live requests fail with WorkerDied."""
        self.home.require()
        for workers in self._groups:
            workers.kill()

    @property
    def draft(self) -> DraftModel | None:
        """The draft model, which the engine's thread uses; None without one."""
        return self._loop.draft

    @property
    def _groups(self) -> list[WorkerGroup]:
        """The workers, and that of the draft."""
        return [self._workers] if self.draft is None else [self._workers, self.draft.workers]

    def _run(self, scheduler: Scheduler) -> None:
        """Runs the engine's thread until the engine is closed or a worker dies."""
        end: TkError = Cancelled("The engine was closed.")
        options, memory = self.source.options, self.source.memory
        try:
            kernels = self._workers.start(self.source.job(), options.start_timeout)
            if self.draft is not None:
                self.draft.start(options.start_timeout)
            self.adapters.start()
            measure_steps(self._workers, self._live.batch, scheduler, memory, options)
            if self.draft is not None:
                measure_draft(self.draft, scheduler, memory)
            self._ready.set_result(kernels)
            turn_with_restarts(self._loop.turn, self._start_again, self._fail_all, options.max_restarts)
        except BaseException as error:  # a panic of a library in Rust is no Exception; callers must get an error
            end = known_or_defect(error, "The engine's thread", WorkerDied)
            end = end.with_traceback(None)  # it has the frame of this function, which has the error and the engine
        finally:
            self._end(end)

    def _start_again(self) -> float:
        """Starts the workers again, with the weights of before; returns the seconds that it took."""
        self._loop.forget()
        timeout = self.source.options.start_timeout
        seconds = 0.0 if self.draft is None else self.draft.restart(timeout)  # first: the others notice a dead one
        seconds += self._workers.restart(self.source.job(), timeout)
        self.adapters.start_again()
        self._live.revive()
        self._availability.report(None)
        return seconds

    def _end(self, error: TkError) -> None:
        """Fails the live requests, and only then ends the workers, which can take seconds."""
        self._live.close()
        self.adapters.end(error)
        started = self._ready.done()
        try:
            self._fail_all(error)
        finally:
            for workers in self._groups:
                workers.close(kill=not (started and isinstance(error, Cancelled)))
            self.source.checkpoint.folder.end_lease()
            if not started:
                self._ready.set_exception(error)

    def _fail_all(self, error: TkError) -> None:
        """Fails the live requests; if a worker has died, later ones are refused with the same error."""
        self._live.fail_all(error)
        if isinstance(error, WorkerDied):
            self._availability.report(error)


def _draft_of(
    source: ModelSource, scheduler: Scheduler, report: Callable[[WorkerDied | None], None]
) -> DraftModel | None:
    """Returns the draft model, whose process starts; None without one."""
    draft, options = source.draft, source.options
    if draft is None:
        return None
    processes = WorkerProcesses(1, draft.options.threads_per_rank)
    workers = WorkerGroup(processes, StepWatch(options.step_timeout, report), name="The draft's rank")
    policy = DraftPolicy(options.speculate, draft.config.context_length, scheduler.proposals)
    scheduler.proposed.drafts = policy
    scheduler.proposals.forgets = False  # its trials measure what proposals cost
    return DraftModel(workers, draft.job(), policy, scheduler.allocator, options.max_running)
