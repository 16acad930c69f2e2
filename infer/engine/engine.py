"""The engine: it accepts requests from any thread, plans every step, lets the workers compute it and sends the events.

The engine does not import torch: the worker processes (`worker.py`) hold the model. One thread owns the workers and
runs the loop schedule -> send -> take, one step ahead of the workers; a lock guards the queues that it shares with
submitting threads.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, Self

from ...core.defects import known_or_defect
from ...core.errors import Cancelled, TkError, WorkerDied
from ...core.home_process import HomeProcess
from .job import threads_per_rank
from .options import EngineOptions
from .planning.memory_plan import MemoryPlan
from .planning.model_source import ModelSource
from .request.events import Event, ModelInfo
from .request.request import Request, check_servable, with_grammar
from .schedule.books import EngineBooks
from .schedule.live_request import LiveRequest, Served, seed_of
from .schedule.live_table import LiveTable
from .schedule.scheduler import Scheduler
from .schedule.step_in_flight import StepInFlight, prepare_step, record_step, take_token
from .schedule.waiting.admission import Limits
from .worker.masks import receive_tokens, send_masks
from .worker.processes import WorkerProcesses
from .worker.restarts import Availability, Watcher, turn_with_restarts
from .worker.step_timing import measure_steps
from .worker.step_watch import StepWatch
from .worker.worker_group import WorkerGroup

# A worker that computes reads nothing: a longer message would wait for it, and it for the reader of its result.
MAX_BYTES_AHEAD: Final = 2**16
OnPlan = Callable[[ModelInfo, MemoryPlan], None]


class Engine:
    """A served model; `Engine.start` makes it. A new one begins to load: `wait_ready` must follow.

    Attributes:
        home: the process that made it; in a fork `close` does nothing, and other calls are refused.
        options: the options of `Engine.start`.
        info: the description of the model.
        tokenizer: the checkpoint's tokenizer; None if the checkpoint has no tokenizer.json.
        grammars: the grammars of constraints over its vocabulary.
        memory: the number of bytes on each rank.
        books: the load, and the blocks of the cache.
        source: the opened checkpoint.
    """

    def __init__(self, options: EngineOptions, source: ModelSource, processes: WorkerProcesses) -> None:
        self.home = HomeProcess("This engine, of an LLM or a server,")
        self.options = options
        self.info: ModelInfo = source.info
        self.tokenizer = source.tokenizer
        self.grammars = source.grammars
        self.memory = memory = source.memory
        self.source = source
        self._served = Served.of(source.info, source.tokenizer, options.prefix_cache, options.speculate)
        self._in_flight: StepInFlight | None = None
        self._begun = 0.0  # when the workers began to compute it
        self._taken: float | None = None  # when they had computed the one before; None: they had nothing to do
        self._arrivals = itertools.count()
        # Guards the scheduler, the table of live requests and `_closing`. The engine's thread alone takes requests out
        # of the table, so it looks them up without the lock.
        self._lock = threading.Lock()
        limits = Limits.of(options, memory.max_model_len)
        self._scheduler = Scheduler(limits, memory.num_blocks, memory.block_size, memory.num_twins)
        self.books = EngineBooks(self._scheduler, self._lock)
        self._live = LiveTable(self._scheduler, self._lock, options.max_running)
        self._availability = Availability()
        self._watch = StepWatch(options.step_timeout, self._availability.report)
        self._workers = WorkerGroup(processes, self._watch, self._live.end_unwanted)
        self._closing = False
        self._ready: Future[str] = Future()  # the kernels of the workers
        self._thread = threading.Thread(target=self._run, name="tk-engine", daemon=True)
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
            processes = processes or WorkerProcesses(options.tp, threads_per_rank(options.tp, options.threads))
            source = ModelSource.open(options)
            on_plan(source.info, source.memory)
            return cls(options, source, processes)
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
    def num_live(self) -> int:
        """The number of requests that are waiting or running."""
        with self._lock:
            return len(self._live.by_key)

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
            WorkerDied: a worker has died.
            Cancelled: the engine is closed.
        """
        self.home.require()
        check_servable(request, self.info, self.tokenizer is not None)
        request = with_grammar(request, self.grammars)
        live = LiveRequest(request, next(self._arrivals), seed_of(request), self._served, on_event)
        with self._lock:
            self._availability.check()
            if self._closing:
                raise Cancelled("The engine is closed.")
            self._live.add(live)
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
        with self._lock:
            self._closing = True
        self._workers.wake(closing=True)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def kill(self) -> None:
        """Ends the workers at once, from any thread, whatever they compute: live requests fail with WorkerDied."""
        self.home.require()
        self._workers.kill()

    def _run(self) -> None:
        """Runs the engine's thread until the engine is closed or a worker dies."""
        end: TkError = Cancelled("The engine was closed.")
        try:
            kernels = self._workers.start(self.source.job(), self.options.start_timeout)
            measure_steps(self._workers, self._live.batch, self._scheduler, self.memory, self.options)
            self._ready.set_result(kernels)
            turn_with_restarts(self._turn, self._start_again, self._fail_all, self.options.max_restarts)
        except BaseException as error:  # a panic of a library in Rust is no Exception; callers must get an error
            end = known_or_defect(error, "The engine's thread", WorkerDied)
            end = end.with_traceback(None)  # it has the frame of this function, which has the error and the engine
        finally:
            self._end(end)

    def _start_again(self) -> float:
        """Starts the workers again, with the weights of before; returns the seconds that it took."""
        self._in_flight = None
        seconds = self._workers.restart(self.source.job(), self.options.start_timeout)
        with self._lock:
            self._scheduler.allocator.flush()
        self._availability.report(None)
        return seconds

    def _end(self, error: TkError) -> None:
        """Fails the live requests, and only then ends the workers, which can take seconds."""
        with self._lock:
            self._closing = True
        started = self._ready.done()
        try:
            self._fail_all(error)
        finally:
            self._workers.close(kill=not (started and isinstance(error, Cancelled)))
            self.source.checkpoint.folder.end_lease()
            if not started:
                self._ready.set_exception(error)

    def _fail_all(self, error: TkError) -> None:
        """Fails the live requests; if a worker has died, later ones are refused with the same error."""
        with self._lock:
            self._availability.set(error if isinstance(error, WorkerDied) else None)
        self._live.fail_all(error)
        if isinstance(error, WorkerDied):
            self._availability.report(error)

    def _turn(self) -> bool:
        """Sends the next step, takes the results of the one before it, or sleeps if there is neither.

        So the workers compute while this thread sends events and plans. Steps are carried out in order: blocks that one
        in flight touches can be given away. Only one with proposals is taken first. Returns False at the end.
        """
        before, self._in_flight = self._in_flight, None
        if before is not None and before.has_proposals:
            self._take(before)
            before = None
        self._live.end_unwanted()
        with self._lock:
            if self._closing:
                return False
            chunks = [chunk for chunk in self._scheduler.schedule() if self._live.batch.can_write(chunk)]
        if chunks:
            step = prepare_step(chunks, self._live.by_key, self._live.batch)
            with self._lock:
                record_step(step, self._scheduler)
            if before is not None and len(step.message) > MAX_BYTES_AHEAD:
                self._take(before)
                before = None
            if before is None:
                self._begin(step)
            self._workers.send(step.message)
            self._in_flight = step
            if before is None:
                self._live.fail_each(send_masks(self._in_flight, self._workers))
        self._live.events_sent()
        if before is not None:
            self._take(before)
        elif not chunks:
            self._taken = None
            self._watch.rest()
            self._workers.sleep()
        return True

    def _begin(self, step: StepInFlight) -> None:
        """Records that the workers compute a step from now on."""
        self._begun = time.monotonic()
        scheduler = self._scheduler  # without the engine, which a watch must not hold
        self._watch.begin(lambda: scheduler.predict(step.chunks))

    def _take(self, step: StepInFlight) -> None:
        """Waits for the results of a step and sends its events."""
        result, failed = receive_tokens(step, self._workers)
        now = time.monotonic()
        with self._lock:
            self._scheduler.observe(step.chunks, now - self._begun, None if self._taken is None else now - self._taken)
        self._taken = now
        if self._in_flight is not None:  # the workers know it already
            self._begin(self._in_flight)
        self._live.fail_each(failed)
        touched: dict[LiveRequest, None] = {}
        for index, row in enumerate(step.rows):
            if row.is_void:
                continue
            touched[request := row.request] = None
            if not result.finite[index]:
                self._live.fail(request, request.not_finite())
            elif row.scored is not None:
                request.score(row.scored, result, index)
            else:
                with self._lock:
                    error = take_token(row, result, index, self._scheduler)
                if error is not None:
                    self._live.fail(request, error)
        self._live.fail_each(send_masks(self._in_flight, self._workers))
        for request in touched:
            if request.is_over:
                self._live.forget(request)
            request.deliver()
        self._live.events_sent()
