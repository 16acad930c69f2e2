"""One call, whatever its protocol: its caller is identified once, its requests run, and the log has a record of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from ....core.errors import Cancelled, DeadlinePassed, UnknownAdapter
from ...engine.request.completion import Completion, CompletionBuilder
from ...engine.request.prompts import Conversation, GivenPrompt, check_length, checked_prompt
from ...engine.request.request import Request, with_grammar
from ...engine.request.sampling_params import SamplingParams
from ...engine.request.streams import CROWD, EventStream, Wakeups
from ..access.tokens import Caller, Callers
from ..engine_protocol import EngineProtocol
from ..errors import Draining
from ..metrics.observer import Observer
from ..metrics.request_record import RequestRecord
from ..metrics.statistics import RequestStatistics
from ..operations.lifecycle import Lifecycle
from .checks import check_request, check_response_size, unknown_adapter
from .prompt_reader import PromptReader
from .request_ids import LiveRequests, check_id, is_id, made_id
from .request_log import RequestLog

INLINE_IDS: Final = 8192  # to copy and check so many token ids takes less than a millisecond
# With 20 alternatives each, so many take a few milliseconds.
INLINE_LOGPROBS: Final = 256
T = TypeVar("T")


class RequestRunner:
    """Runs requests in the engine, for the event loop's thread.

    Attributes:
        lifecycle: the state of the server.
        live: the requests that the engine computes or a handler answers.
        prompts: converts prompts to tokens.
        observer: observes the requests of all protocols that the engine takes.

    Args:
        default_max_new_tokens: the limit for requests that set none; None = up to the model's length.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        lifecycle: Lifecycle,
        default_max_new_tokens: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.engine, self.lifecycle, self.observer = engine, lifecycle, observer or Observer()
        self._default_max_new_tokens = default_max_new_tokens
        wakeups = Wakeups(CROWD)
        engine.after_events(wakeups.flush)
        self.live = LiveRequests(wakeups)
        self.prompts = PromptReader(engine)

    @asynccontextmanager
    async def run(self, asked: Request, caller: Caller) -> AsyncIterator[EventStream]:
        """Runs a request in the engine, which has accepted it, while the body runs, and yields its events.

        At the end of the body (success, error, cancellation) the request ends in the engine too.

        Args:
            asked: the request, which has an id.
            caller: who asks.

        Raises:
            TkError: the request is refused; nothing was allocated for it.
        """
        self.lifecycle.check_loaded()
        check_request(asked, self.engine.info, caller)
        self.lifecycle.check_admitting()
        check_id(asked.request_id)
        request_id, principal = asked.request_id, caller.principal
        stream = self.live.open(request_id, principal)
        submitted = False
        try:
            async with stream.preparing():
                request = await self._engine_request(asked, caller)
            try:
                self.engine.submit(request, self.observer.begin(request, stream.push))
            except UnknownAdapter:  # the engine names all
                raise unknown_adapter(request.adapter, self.usable_adapters(caller)) from None
            submitted = True
            yield stream
        finally:
            stream.leave()
            if not submitted:
                self.live.discard(request_id, principal)
            elif not stream.ended:
                self.engine.abort(request_id, principal)

    def abort(self, request_id: str, principal: str) -> bool:
        """Ends a live request, whose caller gets CANCELLED; returns False if it is not live."""
        stream = self.live.find(request_id, principal)
        if stream is None:
            return False
        self.engine.abort(request_id, principal)
        stream.interrupt(Cancelled(f"Request {request_id} was ended by an operator."))
        return True

    def end_live_requests(self) -> None:
        """Ends all live requests: their callers get UNAVAILABLE, and their handlers abort them in the engine."""
        for stream in self.live.streams():
            stream.interrupt(Draining("The server ended before the request did; ask another one."))

    def usable_adapters(self, caller: Caller) -> list[str]:
        """Returns the names of the loaded adapters that a caller may use."""
        return [each.name for each in self.engine.adapters.infos if caller.may_use(each.name)]

    async def _engine_request(self, asked: Request, caller: Caller) -> Request:
        """Makes the engine's request; checks options and length before it copies or tokenizes a long prompt."""
        info = self.engine.info
        asked.params.validate(info.vocab_size)
        ids = asked.prompt  # copied when their number is checked
        if isinstance(ids, str):
            ids = await self.prompts.of_text(ids, asked.special_tokens)
        elif isinstance(ids, Conversation):
            ids = await self.prompts.of_chat(ids, caller.principal)
        check_length(len(ids), info.max_model_len)
        params, num_scored = self._with_default_length(asked.params, len(ids)), len(ids) - asked.logprobs_from
        check_response_size(params, num_scored, info.max_model_len, self.prompts.longest_token_bytes, asked.at_once)
        if len(ids) <= INLINE_IDS:
            tokens = checked_prompt(ids, info.vocab_size)
        else:
            tokens = await asyncio.to_thread(checked_prompt, ids, info.vocab_size)
        of_caller = replace(asked, principal=caller.principal, weight=caller.weight)
        made = replace(of_caller, prompt=tokens, params=params, is_checked=True)
        if params.constraint is None:
            return made
        return await asyncio.to_thread(with_grammar, made, self.engine.grammars)

    def _with_default_length(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Sets the server's default limit if the client set none, but never below the client's min_new_tokens."""
        if params.max_new_tokens is not None or self._default_max_new_tokens is None:
            return params
        room = self.engine.info.max_model_len - num_prompt_tokens
        length = min(max(self._default_max_new_tokens, params.min_new_tokens), room)
        return replace(params, max_new_tokens=length) if length > 0 else params


@dataclass(frozen=True)
class Frontend:
    """The part of a server that the calls of all protocols share.

    Attributes:
        callers: identifies the callers by their tokens.
        log: the log of calls.
        runner: runs the requests.
        statistics: counts the requests.
    """

    callers: Callers
    log: RequestLog
    runner: RequestRunner
    statistics: RequestStatistics


class ServerCall:
    """A call; its protocol makes it with the record that the log gives, and forms its answer or error.

    Args:
        frontend: the server's part that all calls share.
        record: what the log says of the call.
        headers: the headers of HTTP or the metadata of gRPC, which have the token.
        deadline: the value of time.monotonic() after which the caller no longer waits, or None.

    Attributes:
        caller: the caller; before `identify`, one that any call has on a server without tokens.
    """

    def __init__(
        self,
        frontend: Frontend,
        record: RequestRecord,
        headers: Sequence[tuple[str, str | bytes]],
        deadline: float | None = None,
    ) -> None:
        self._frontend, self._headers = frontend, headers
        self.record, self.deadline, self.caller = record, deadline, Caller()

    def identify(self) -> None:
        """Finds the caller; raises Unauthenticated if it has no token, or an unknown one."""
        self.caller = self._frontend.callers.identify(self._headers)
        self.record.principal = self.caller.principal

    def expect(self, request_id: str = "") -> None:
        """Records that the call is for a request to the engine, and the caller's name for it."""
        self.record.run(self._headers, self.deadline)
        if is_id(request_id):
            self.record.request_id = request_id

    def end_within(self, seconds: float | None) -> None:
        """Sets the deadline of a call for a request to some seconds from now, unless it is earlier."""
        given = [deadline for deadline in (self.deadline, deadline_of(seconds)) if deadline is not None]
        self.deadline = self.record.terms.deadline = min(given, default=None)

    def describe(self, *prompts: GivenPrompt) -> None:
        """Records the kind of the prompts and, if they are logged, the prompts."""
        self._frontend.log.describe(self.record, *prompts)

    @asynccontextmanager
    async def run(self, *requests: Request) -> AsyncIterator[list[EventStream]]:
        """Runs requests in the engine, all together, while the body runs; yields the events of each.

        None has been admitted until all have. A request without an id gets one.

        Raises:
            TkError: a request is refused; those before it end.
        """
        named = [replace(each, request_id=each.request_id or made_id(), deadline=self.deadline) for each in requests]
        self.record.terms.params = named[0].params
        async with AsyncExitStack() as stack:
            running = self._frontend.runner.run
            streams = [await stack.enter_async_context(running(request, self.caller)) for request in named]
            self.record.admit(self.record.request_id or named[0].request_id, named[0].adapter)
            yield streams

    async def completion(self, events: EventStream) -> Completion:
        """Reads the events of a request to their end, and returns what they make."""
        builder = CompletionBuilder()
        async for event in events:
            self.record.see(event)
            builder.add(event)
        return builder.completion()

    @contextmanager
    def part(self) -> Iterator["ServerCall"]:
        """A context around one request of many: a call of its own, with its own record, of the same caller."""
        with self._frontend.log.call(self.record.method, self.record.client) as record:
            part = ServerCall(self._frontend, record, self._headers, self.deadline)
            part.caller, record.principal = self.caller, self.caller.principal
            yield part


async def converted(convert: Callable[..., T], *completions: Completion) -> T:
    """Converts completions to an answer, beside the event loop if they have many log-probabilities."""
    entries = sum(len(each.prompt_logprobs) + sum(len(one.logprobs) for one in each.choices) for each in completions)
    if entries <= INLINE_LOGPROBS:
        return convert(*completions)
    return await asyncio.to_thread(convert, *completions)


def deadline_of(seconds: float | None) -> float | None:
    """Returns the value of time.monotonic() after some seconds from now; None if none are given."""
    return None if seconds is None else time.monotonic() + seconds


@asynccontextmanager
async def ended_by(deadline: float | None) -> AsyncIterator[None]:
    """Ends the body at a deadline, whatever it waits for: the body is cancelled, as if its caller had left.

    The engine looks at deadlines between two steps. A call may wait for something else, a long text's tokens or a
    grammar, and an engine that hangs looks at nothing; so the event loop ends every call itself.

    Args:
        deadline: the value of time.monotonic() at which the caller stops waiting; None = never.

    Raises:
        DeadlinePassed: the deadline passed before the body had ended.
    """
    timer = asyncio.timeout(None if deadline is None else deadline - time.monotonic())
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():  # it is the body's own
            raise
        raise DeadlinePassed(
            "The call's deadline passed before its answer was complete. Allow more time, or ask for fewer tokens."
        ) from error
