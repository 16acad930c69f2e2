"""The bridge from the engine's thread to coroutines: one EventStream per request, one wake-up per step for all of them.

The engine pushes events and never waits. For a slow reader the stream joins deltas: it queues at most one open delta
per sample, for any number of tokens. A delta closes at a size that fits a message, so memory grows only with the text.
"""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from ....core.errors import TkError
from .events import Delta, Done, Event, Failed, Finished, PromptLogprobs, SentEvent, Started, TokenLogprob

# With 20 alternatives per token, it takes the event loop some milliseconds to convert a message of this many tokens.
MAX_TOKENS_PER_DELTA: Final = 256
# Where a step has tokens for more streams than this, each message waits for a second token (a third from twice as many
# streams on, and so on): a message takes as long as all other work of the server for a token.
CROWD: Final = 24
MOST_HELD: Final = 4
HOLD_SECONDS: Final = 0.1  # no token waits longer for another one


@dataclass
class _OpenDelta:
    """A queued delta, which later deltas of its sample can join."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def join(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)

    def close(self) -> Delta:
        return Delta(self.index, "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs))


_Queued = Started | PromptLogprobs | _OpenDelta | Finished | Done | Failed


class _EventQueue:
    """The events that a reader has yet to read; deltas of a sample are joined while they fit a message."""

    def __init__(self) -> None:
        self._events: deque[_Queued] = deque()
        self._open: dict[int, _OpenDelta] = {}

    def push(self, event: Event) -> None:
        """Adds an event at the end, or joins it to the open delta of its sample."""
        if not isinstance(event, Delta):
            self._events.append(event)
            return
        fits = len(event.token_ids) <= MAX_TOKENS_PER_DELTA
        for part in (event,) if fits else _parts_of(event):
            delta = self._open.get(part.index)
            if delta is None or len(delta.token_ids) + len(part.token_ids) > MAX_TOKENS_PER_DELTA:
                delta = self._open[part.index] = _OpenDelta(part.index)
                self._events.append(delta)
            delta.join(part)

    def push_first(self, event: Failed) -> None:
        """Adds an event before all others."""
        self._events.appendleft(event)

    def pop(self) -> _Queued | None:
        """Removes and returns the first event; None if there is none."""
        event = self._events.popleft() if self._events else None
        if isinstance(event, _OpenDelta) and self._open.get(event.index) is event:
            del self._open[event.index]
        return event

    def clear(self) -> None:
        """Drops all events."""
        self._events.clear()
        self._open.clear()

    def has_only_tokens(self, fewer_than: int) -> bool:
        """Returns whether it has events and all are deltas, of fewer tokens than these together."""
        tokens = [event.token_ids for event in self._events if isinstance(event, _OpenDelta)]
        return 0 < len(tokens) == len(self._events) and sum(map(len, tokens)) < fewer_than


class Wakeups:
    """The streams with events that their readers do not know of yet; `flush` wakes the readers.

    To wake an event loop costs a system call and a switch of threads, far more than an event. So the engine calls
    `flush` once for all streams when it has sent the events of a step.

    Args:
        crowd: the number of streams above which readers get several tokens at once; None = they never wait.
    """

    def __init__(self, crowd: int | None = None) -> None:
        self._crowd = crowd
        self._lock = threading.Lock()
        self._due: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """Adds a stream to those of the next `flush`, from any thread."""
        with self._lock:
            self._due.append(stream)

    def flush(self) -> int:
        """Wakes the readers of all added streams, from any thread; returns the number of event loops that it woke."""
        with self._lock:
            due, self._due = self._due, []
        loops: dict[asyncio.AbstractEventLoop, list[EventStream]] = defaultdict(list)
        for stream in due:
            loops[stream.loop].append(stream)
        for loop, streams in loops.items():
            with suppress(RuntimeError):  # the loop is closed, so no reader is left
                loop.call_soon_threadsafe(_wake_all, streams, self._tokens_at_once(len(streams)))
        return len(loops)

    def _tokens_at_once(self, num_streams: int) -> int:
        return 1 if self._crowd is None else min(1 + (num_streams - 1) // self._crowd, MOST_HELD)


class EventStream:
    """The events of one request: the engine's thread pushes them and one coroutine iterates over them.

    Iteration ends at Done and raises the error of Failed. The event loop's thread makes the stream.

    Attributes:
        loop: the event loop of the reader.
    """

    def __init__(self, wakeups: Wakeups, on_close: Callable[[], None] = lambda: None) -> None:
        """Makes an empty stream.

        Args:
            wakeups: wakes the reader when it is flushed.
            on_close: is called once, on the loop, when both the engine and the reader are done with the request.
        """
        self.loop = asyncio.get_running_loop()
        self._wakeups, self._on_close = wakeups, on_close
        self._ready = asyncio.Event()
        self._preparing: asyncio.Timeout | None = None
        self._hold: object | None = None  # while the reader is not woken although there are tokens for it
        self._lock = threading.Lock()  # guards all below
        self._events = _EventQueue()
        self._wake_due = self._ended = self._left = self._closed = False

    def push(self, event: Event) -> None:
        """Queues an event, from any thread, without blocking, for the reader to find after the next flush.

        Events after the last one are dropped.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = isinstance(event, (Done, Failed))
            if not self._left:
                self._events.push(event)
            elif not self._ended:
                return
            wake, self._wake_due = not self._wake_due, True
        if wake:
            self._wakeups.add(self)

    def interrupt(self, error: TkError) -> None:
        """Makes this error the reader's next event, before all queued ones; on the loop's thread only."""
        with self._lock:
            self._events.push_first(Failed(error))
        self._ready.set()
        if self._preparing is not None and self._preparing.when() is None:
            self._preparing.reschedule(self.loop.time())

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """A context for what comes before the first event: `interrupt` ends the body too, with its error."""
        timer = self._preparing = asyncio.timeout(None)
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():  # it is the body's own
                raise
            await anext(self)  # raises the error
        finally:
            self._preparing = None

    def leave(self) -> None:
        """Ends the reading: drops queued and later events, except the last; on the loop's thread only."""
        with self._lock:
            self._left = True
            self._events.clear()
        self._close_if_over()

    @property
    def ended(self) -> bool:
        """Whether the engine is done with the request."""
        with self._lock:
            return self._ended

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> SentEvent:
        while True:
            with self._lock:
                event = self._events.pop()
                if event is None:
                    self._ready.clear()
            match event:
                case None:
                    await self._ready.wait()
                case Done():
                    raise StopAsyncIteration
                case Failed():
                    raise event.error
                case _OpenDelta():
                    return event.close()
                case _:
                    return event

    def wake(self, at_once: int = 1) -> object | None:
        """Wakes the reader, unless there are only tokens for it, fewer than `at_once`; on the loop's thread only.

        Returns:
            None if it was woken, else this hold, for `release`.
        """
        with self._lock:
            self._wake_due = False
            self._hold = object() if self._events.has_only_tokens(at_once) else None
        if self._hold is None:
            self._ready.set()
            self._close_if_over()
        return self._hold

    def release(self, hold: object) -> None:
        """Wakes the reader if this hold still lasts; on the loop's thread only."""
        if self._hold is hold:
            self.wake()

    def _close_if_over(self) -> None:
        with self._lock:
            if self._closed or not (self._ended and self._left):
                return
            self._closed = True
        self._on_close()


def _parts_of(delta: Delta) -> Iterable[Delta]:
    """Returns a delta as deltas that fit messages; many tokens come at once if they have waited for their places."""
    starts = range(0, len(delta.token_ids), MAX_TOKENS_PER_DELTA)
    ranges = [slice(start, start + MAX_TOKENS_PER_DELTA) for start in starts]
    return [
        Delta(delta.index, "" if part.start else delta.text, delta.token_ids[part], delta.logprobs[part])
        for part in ranges
    ]


def _wake_all(streams: Sequence[EventStream], at_once: int) -> None:
    held = [(stream, hold) for stream in streams if (hold := stream.wake(at_once)) is not None]
    if held:
        asyncio.get_running_loop().call_later(HOLD_SECONDS, _release_all, held)


def _release_all(held: Iterable[tuple[EventStream, object]]) -> None:
    for stream, hold in held:
        stream.release(hold)
