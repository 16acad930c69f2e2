"""The live requests of an engine, from their submission to their end, whatever it is."""

import threading
import time
from collections.abc import Callable, Iterable

from ....core.errors import Cancelled, InvalidRequest, TkError
from .batch_writer import BatchWriter
from .live_request import LiveRequest
from .scheduler import Scheduler


class LiveTable:
    """The live requests, by principal and id. Only the engine's thread ends them.

    Attributes:
        by_key: the requests; the lock guards them.
        batch: the slots of their samples in the workers.
        after_events: the callbacks for `events_sent`.

    Args:
        scheduler: the engine's scheduler.
        lock: guards it.
        max_running: the largest number of samples that are computed at the same time.
    """

    def __init__(self, scheduler: Scheduler, lock: threading.Lock, max_running: int) -> None:
        live = self.by_key = dict[tuple[str, str], LiveRequest]()
        self.batch = BatchWriter(max_running, lambda sample: live[sample.request.key].stopping)
        self.after_events: list[Callable[[], object]] = []
        self._scheduler, self._lock = scheduler, lock
        self._cancelled: list[LiveRequest] = []

    def add(self, live: LiveRequest) -> None:
        """Queues a new request; the caller holds the lock.

        Raises:
            InvalidRequest: another live request has its id.
            RequestError, Overloaded: see `Scheduler.add`.
        """
        request = live.request
        if request.key in self.by_key:
            raise InvalidRequest(
                f"Request id {request.request_id!r} belongs to a live request; choose another.", field="request_id"
            )
        self._scheduler.add(live.samples, time.monotonic())
        self.by_key[request.key] = live

    def cancel(self, key: tuple[str, str]) -> bool:
        """Lets `end_unwanted` end a request, from any thread; returns False if it is not live."""
        with self._lock:
            request = self.by_key.get(key)
            if request is not None:
                self._cancelled.append(request)
        return request is not None

    def end_unwanted(self) -> None:
        """Ends requests that were cancelled or whose deadline has passed; a step may compute them meanwhile."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, []
            expired = {sample.request.key for sample in self._scheduler.expire(time.monotonic())}
            late = [self.by_key[key] for key in expired]
        self.fail_each((each, Cancelled(f"Request {each.request.request_id} was aborted.")) for each in cancelled)
        self.fail_each((each, each.too_late()) for each in late)
        if cancelled or late:
            self.events_sent()

    def fail_all(self, error: TkError) -> None:
        """Ends all requests with an error."""
        with self._lock:
            live = list(self.by_key.values())
        self.fail_each((request, error) for request in live)
        self.events_sent()

    def fail_each(self, failed: Iterable[tuple[LiveRequest, TkError]]) -> None:
        """Ends requests, each with an error of its own."""
        for request, error in failed:
            self.fail(request, error)

    def fail(self, request: LiveRequest, error: TkError) -> None:
        """Ends a request with an error, unless it has ended already."""
        if request.is_over:
            return
        self.forget(request)
        request.fail(error)
        request.deliver()

    def forget(self, request: LiveRequest) -> None:
        """Removes a request, and gives its blocks and slots to others."""
        with self._lock:
            for sample in request.samples:
                self._scheduler.finish(sample)
                self.batch.release(sample)
            if self.by_key.get(request.request.key) is request:  # a later one may have its id
                del self.by_key[request.request.key]

    def events_sent(self) -> None:
        """Calls back: all events so far are sent."""
        for callback in self.after_events:
            callback()
