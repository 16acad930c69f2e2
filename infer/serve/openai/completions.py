"""The calls /v1/completions and /v1/chat/completions: from the body to the answer, whole or as server-sent events."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ...engine.request.completion import Choice, Completion, CompletionBuilder
from ...engine.request.events import Delta, Finished, PromptLogprobs, SentEvent, Started, TokenLogprob, Usage
from ...engine.request.prompts import Conversation
from ...engine.request.request import Request
from ...engine.request.streams import EventStream
from ..access.tokens import Caller
from ..call.call import RequestRunner, ServerCall, converted, ended_by
from ..call.checks import unknown_model
from ..call.request_ids import METADATA_KEY
from ..http.connection import HttpConnection
from ..http.framing import HttpRequest
from ..http.json_body import JSON, dumped, parsed
from ..http.problems import HttpProblem
from ..metrics.request_record import RequestRecord
from .dialects import CompletionCall, Dialect, read_call, reason_of
from .echo import Echo

TIMEOUT_HEADER: Final = "x-request-timeout"
Numbered = tuple[int, SentEvent]  # an event, after the number of its request
Finish = Callable[[], Awaitable[None]]


class Completions:
    """Answers the calls of one path.

    Args:
        runner: runs the requests of the server.
        dialect: the form of bodies and answers.
    """

    def __init__(self, runner: RequestRunner, dialect: Dialect) -> None:
        self._runner, self._dialect = runner, dialect

    async def __call__(self, request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        call.expect()
        call.end_within(_timeout(request))
        request_id = request.header(METADATA_KEY) or request.id
        async with ended_by(call.deadline):
            asked = await parsed(request.body, lambda body: read_call(self._dialect, body, request_id))
            asked = _with_adapter(asked, self._runner, call.caller)
            call.describe(*(each.prompt for each in asked.requests))
            async with call.run(*asked.requests) as streams, aclosing(_events(streams, call.record)) as events:
                model = asked.requests[0].adapter or self._runner.engine.info.name
                echoes = [await self._echo(each, asked) for each in asked.requests] if asked.has_echo else []
                answer = _Answer(self._dialect, asked, model, request.id, await anext(events), echoes)
                finish = await (answer.stream if asked.is_streamed else answer.whole)(events, reply)
        await finish()  # a client that takes its time is not late

    async def _echo(self, asked: Request, call: CompletionCall) -> Echo:
        """Returns the prompt that begins the text of a request's samples."""
        prompt, tokenizer = asked.prompt, self._runner.engine.tokenizer
        assert not isinstance(prompt, Conversation), "a chat has no echo"
        if not isinstance(prompt, str):
            prompt = "" if tokenizer is None else await asyncio.to_thread(tokenizer.decode, list(prompt))
        return Echo(prompt, call.is_prompt_only)


def _with_adapter(asked: CompletionCall, runner: RequestRunner, caller: Caller) -> CompletionCall:
    """Returns a call whose model is a loaded adapter as one to the served model with that adapter.

    Raises:
        UnknownModel: the model is neither; the error names those that the caller may use.
        Loading: the model is not loaded yet.
    """
    engine, name = runner.engine, asked.requests[0].model
    if name in ("", *engine.info.names):
        return asked
    runner.lifecycle.check_loaded()  # before, no adapter is known
    if all(each.name != name for each in engine.adapters.infos):
        raise unknown_model(name, (*engine.info.names, *runner.usable_adapters(caller)))
    return replace(asked, requests=tuple(replace(each, model="", adapter=name) for each in asked.requests))


async def _events(streams: Sequence[EventStream], record: RequestRecord) -> AsyncGenerator[Numbered, None]:
    """Yields the events of a call's requests, as they come, with the number of each event's request."""
    if len(streams) == 1:
        async for event in streams[0]:
            record.see(event)
            yield 0, event
        return
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    num_left = len(pumps)
    try:
        while num_left:
            taken = await queue.get()
            if isinstance(taken, Exception):
                raise taken
            if taken is None:
                num_left -= 1
            else:
                record.see(taken[1])
                yield taken
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, stream: EventStream, queue: asyncio.Queue[Numbered | Exception | None]) -> None:
    """Moves the events of a stream into the queue of all; one that waits there lets the stream join its deltas."""
    try:
        async for event in stream:
            await queue.put((number, event))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


class _Answer:
    """The answer to one call, from its first event on; `echoes` has the echo of each request, or nothing."""

    def __init__(
        self,
        dialect: Dialect,
        asked: CompletionCall,
        model: str,
        name: str,
        first: Numbered,
        echoes: Sequence[Echo],
    ) -> None:
        self._dialect, self._asked, self._first, self._echoes = dialect, asked, first, echoes
        self._samples, self._has_logprobs = asked.params.n, asked.params.logprobs is not None
        event = first[1]
        assert isinstance(event, Started), "the first event of a request"
        self._common = {
            "id": dialect.id_prefix + name,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": _fingerprint(event),
        }
        self._usages: dict[int, Usage] = {}

    async def whole(self, events: AsyncIterator[Numbered], reply: HttpConnection) -> Finish:
        """Makes the complete answer; returns what sends it."""
        builders = [CompletionBuilder() for _ in self._asked.requests]
        builders[self._first[0]].add(self._first[1])
        async for number, event in events:
            builders[number].add(event)
        body = await converted(self._body, *(builder.completion() for builder in builders))
        return partial(reply.whole, 200, JSON, body)

    def _body(self, *completions: Completion) -> bytes:
        """Returns the complete answer in JSON."""
        choices = [
            self._dialect.whole(choice, number * self._samples + choice.index, self._has_logprobs)
            for number, completion in enumerate(completions)
            for choice in self._echoed(number, completion)
        ]
        usage = _usage([self._counted(completion.usage) for completion in completions])
        answer = {**self._common, "object": self._dialect.whole_object, "choices": choices, "usage": usage}
        return dumped(answer)

    def _echoed(self, number: int, completion: Completion) -> Sequence[Choice]:
        """Returns the samples of a request, with its prompt before them if that is wanted."""
        if not self._echoes:
            return completion.choices
        echo = self._echoes[number]
        prompt = echo.entries(completion.prompt_logprobs)
        return [echo.before(choice, prompt) for choice in completion.choices]

    def _counted(self, usage: Usage) -> Usage:
        """Returns the numbers of tokens that the caller has of a request."""
        return replace(usage, completion_tokens=0) if self._asked.is_prompt_only else usage

    async def stream(self, events: AsyncIterator[Numbered], reply: HttpConnection) -> Finish:
        """Sends the answer in chunks; returns what sends its end."""
        await reply.begin(200, "text/event-stream", [("cache-control", "no-cache")])
        await self._send(self._first, reply)
        async for numbered in events:
            await self._send(numbered, reply)
        return partial(self._end, reply)

    async def _end(self, reply: HttpConnection) -> None:
        if self._asked.has_usage:
            usages = list(self._usages.values())
            await reply.event(self._chunk([]) | {"usage": _usage(usages)})
        await reply.send(b"data: [DONE]\n\n")
        await reply.end()

    async def _send(self, numbered: Numbered, reply: HttpConnection) -> None:
        number, event = numbered
        indexes = range(number * self._samples, (number + 1) * self._samples)
        if isinstance(event, Started):
            opened = [choice for index in indexes if (choice := self._dialect.opening(index)) is not None]
            choices = [*opened, *self._prompt(number, event.prompt_logprobs, is_first=True)]
        elif isinstance(event, PromptLogprobs):
            choices = self._prompt(number, event.logprobs)
        else:
            made = self._choice(event, number, indexes[event.index])
            choices = [] if made is None else [made]
        for choice in choices:
            await reply.event(self._chunk([choice]))

    def _prompt(self, number: int, scores: Sequence[TokenLogprob], is_first: bool = False) -> list[dict[str, Any]]:
        """Returns the chunks of a part of a prompt, one for each sample; none where it is not wanted."""
        if not self._echoes:
            return []
        echo = self._echoes[number]
        text, entries = echo.text if is_first else "", echo.entries(scores)
        logprobs = self._dialect.logprobs(entries) if self._has_logprobs else None
        return [
            self._dialect.chunk(number * self._samples + each, text, logprobs, None) for each in range(self._samples)
        ]

    def _choice(self, event: Delta | Finished, number: int, index: int) -> dict[str, Any] | None:
        """Returns the chunk of an event; None if there is nothing in it to send yet."""
        if isinstance(event, Finished):
            self._count(number, self._counted(event.usage))
            return self._dialect.chunk(index, "", None, reason_of(event.reason))
        if self._asked.is_prompt_only:
            return None
        logprobs = None
        if self._has_logprobs:
            entries = self._echoes[number].later(event.logprobs) if self._echoes else event.logprobs
            logprobs = self._dialect.logprobs(entries)
        return self._dialect.chunk(index, event.text, logprobs, None) if event.text or logprobs else None

    def _count(self, number: int, usage: Usage) -> None:
        """Adds the tokens of a finished sample to those of its prompt."""
        before = self._usages.get(number)
        tokens = usage.completion_tokens + (0 if before is None else before.completion_tokens)
        self._usages[number] = Usage(usage.prompt_tokens, usage.cached_tokens, tokens)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "object": self._dialect.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._asked.has_usage else chunk


def _fingerprint(started: Started) -> str:
    """Returns the name of the weights of an answer, which may be others than the newest."""
    adapter = f"-adapter-{started.adapter_sha256[:16]}" if started.adapter_sha256 else ""
    return f"step-{started.step}{adapter}"


def _usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Returns the numbers of tokens of all prompts of a call."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def _timeout(request: HttpRequest) -> float | None:
    """Returns the seconds that the caller waits, or None."""
    given = request.header(TIMEOUT_HEADER)
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise HttpProblem(f"The header {TIMEOUT_HEADER} is {given[:40]!r}; it must be a number of seconds.", 400)
    return seconds
