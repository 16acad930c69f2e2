"""The live requests of an engine and the scheduler of their samples, which its thread shares with those that submit."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ....core.errors import Cancelled, InvalidRequest, TkError, WorkerDied
from ..step.sampler_output import SamplerOutput
from .batch_writer import BatchWriter
from .live_request import LiveRequest
from .samples.sample import UNKNOWN, ScheduledChunk, Source
from .scheduler import Scheduler
from .step_in_flight import StepInFlight, WantedRow


class LiveTable:
    """The live requests, by principal and id, from their submission to their end, whatever it is.

    The lock guards the scheduler and all that is private here, and each method takes it. Any thread may add, cancel and
    close; only the engine's thread calls the other methods. No event is sent while it holds the lock.

    Attributes:
        batch: the slots of the samples in the workers, of the engine's thread alone.
        after_events: the callbacks for `events_sent`.

    Args:
        scheduler: the engine's scheduler.
        lock: guards the scheduler and all that is kept here.
        by_adapter: whether samples of one adapter stand together in a step, so that its factors are read once.
    """

    def __init__(self, scheduler: Scheduler, lock: threading.Lock, by_adapter: bool = False) -> None:
        self.batch = BatchWriter(scheduler.limits.max_running)
        self.after_events: list[Callable[[], object]] = []
        self._scheduler, self._lock, self._by_adapter = scheduler, lock, by_adapter
        self._requests: dict[tuple[str, str], LiveRequest] = {}
        self._cancelled: list[LiveRequest] = []
        self._death: WorkerDied | None = None  # why requests are refused, until the workers start again
        self._is_closing = False

    def __len__(self) -> int:
        """The number of live requests."""
        with self._lock:
            return len(self._requests)

    def add(self, live: LiveRequest) -> None:
        """Queues a new request.

        Raises:
            InvalidRequest: another live request has its id.
            RequestError, Overloaded: see `Scheduler.add`.
            WorkerDied: the workers are dead.
            Cancelled: the engine is closed.
        """
        request = live.request
        with self._lock:
            if self._death is not None:
                raise WorkerDied(str(self._death), self._death.retry_after)
            if self._is_closing:
                raise Cancelled("The engine is closed.")
            if request.key in self._requests:
                raise InvalidRequest(
                    f"Request id {request.request_id!r} belongs to a live request; choose another.", field="request_id"
                )
            self._scheduler.add(live.samples, time.monotonic())
            self._requests[request.key] = live

    def cancel(self, key: tuple[str, str]) -> bool:
        """Lets `end_unwanted` end a request; returns False if it is not live."""
        with self._lock:
            live = self._requests.get(key)
            if live is not None:
                self._cancelled.append(live)
        return live is not None

    def close(self) -> None:
        """Refuses requests from now on, and lets `schedule` return None."""
        with self._lock:
            self._is_closing = True

    def schedule(self) -> list[tuple[ScheduledChunk, LiveRequest]] | None:
        """Returns the chunks of the next step that can be computed now, with their requests; None after `close`."""
        with self._lock:
            if self._is_closing:
                return None
            chunks: Iterable[ScheduledChunk] = filter(self.batch.can_write, self._scheduler.schedule())
            if self._by_adapter:
                chunks = sorted(chunks, key=lambda chunk: chunk.sample.adapter)
            return [(chunk, self._requests[chunk.sample.request.key]) for chunk in chunks]

    def await_tokens(self) -> bool:
        """Returns whether the next step shall be planned with the results of the one before."""
        with self._lock:
            return self._scheduler.proposed.await_tokens

    def record_step(self, step: StepInFlight) -> None:
        """Records that a step is sent: its tokens count as computed, and samples of rows that choose get UNKNOWN."""
        with self._lock:
            for chunk in step.chunks:
                self._scheduler.advance(chunk)
            for row in step.rows:
                if row.scored is None and row.proposal is None:
                    row.sample.output.tokens.append(UNKNOWN)

    def predict(self, chunks: Iterable[ScheduledChunk]) -> float:
        """Returns the expected duration of a step; see `Scheduler.predict`."""
        with self._lock:
            return self._scheduler.predict(chunks)

    def observe(self, chunks: Sequence[ScheduledChunk], seconds: float, period: float | None) -> None:
        """Records the duration of a step; see `Scheduler.observe`."""
        with self._lock:
            self._scheduler.observe(chunks, seconds, period)

    def add_token(self, row: WantedRow, result: SamplerOutput, index: int) -> None:
        """Gives a sample the token of a row that is not void, at `index` of the results; ends it if it is complete.

        Those that are sure come before it. If the tokenizer has no text for a token, the request fails.
        """
        with self._lock:
            if row.proposal is not None:
                self._scheduler.accept(row.sample, row.source)
            try:
                for position, token in enumerate((*row.sure, int(result.token_ids[index])), row.position):
                    if position > row.position:
                        self._scheduler.accept(row.sample, Source.CONSTRAINT)
                    self._scheduler.activity.new_token()
                    if row.request.add_token(row.sample, position, token, result, index):
                        self._scheduler.finish(row.sample)
                        break
                return
            except TkError as error:
                failure = error
        self.fail(row.request, failure)

    def end_unwanted(self) -> None:
        """Ends requests that were cancelled or whose deadline has passed; a step may compute them meanwhile."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, []
            expired = self._scheduler.expire(time.monotonic())
            if not cancelled and not expired:
                return
            late = [self._requests[key] for key in {sample.request.key for sample in expired}]
        self.fail_each((each, Cancelled(f"Request {each.request.request_id} was aborted.")) for each in cancelled)
        self.fail_each((each, each.too_late()) for each in late)
        self.events_sent()

    def fail_all(self, error: TkError) -> None:
        """Ends all requests with an error; if it is the death of a worker, later ones are refused with it."""
        with self._lock:
            self._death = error if isinstance(error, WorkerDied) else None
            live = list(self._requests.values())
        self.fail_each((request, error) for request in live)
        self.events_sent()

    def revive(self) -> None:
        """Forgets the death of the workers and what their cache held: requests are welcome again."""
        with self._lock:
            self._death = None
            self._scheduler.allocator.flush()

    def fail_each(self, failed: Iterable[tuple[LiveRequest, TkError]]) -> None:
        """Ends requests, each with an error of its own."""
        for request, error in failed:
            self.fail(request, error)

    def fail(self, request: LiveRequest, error: TkError) -> None:
        """Ends a request with an error, unless it has ended already."""
        if not request.is_over:
            request.fail(error)
            self.end(request)

    def end(self, request: LiveRequest) -> None:
        """Removes a request that is over, gives its blocks and slots to others, and sends its last events."""
        with self._lock:
            for sample in request.samples:
                self._scheduler.finish(sample)
            if self._requests.get(request.request.key) is request:  # a later one may have its id
                del self._requests[request.request.key]
        for sample in request.samples:
            self.batch.release(sample)
        if request.request.lease is not None:
            request.request.lease.release()
        request.deliver()

    def events_sent(self) -> None:
        """Calls back: all events so far are sent."""
        for callback in self.after_events:
            callback()
