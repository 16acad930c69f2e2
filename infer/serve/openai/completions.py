"""The calls /v1/completions and /v1/chat/completions: from the body to the answer, whole or as server-sent events."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from ...engine.request.completion import Completion, CompletionBuilder
from ...engine.request.events import Delta, Finished, PromptLogprobs, Started, Usage
from ..call.call import INLINE_LOGPROBS, ServerCall
from ..call.deadline import ended_by
from ..call.request_ids import METADATA_KEY
from ..http.json_body import parsed
from ..http.messages import EVENTS, JSON, LAST_EVENT, HttpRequest, Reply, dumped, event_of
from ..http.problems import HttpProblem
from .asked import AskedCompletion, Read
from .choices import Dialect, reason_of, usage_of
from .served import Numbered, ServedModel, running_all

TIMEOUT_HEADER: Final = "x-request-timeout"
Finish = Callable[[], Awaitable[None]]


class Completions:
    """Answers the calls of one path.

    Args:
        model: the served model.
        read: reads the body.
        dialect: forms the answers.
    """

    def __init__(self, model: ServedModel, read: Read, dialect: Dialect) -> None:
        self._model, self._read, self._dialect = model, read, dialect

    async def __call__(self, request: HttpRequest, call: ServerCall, reply: Reply) -> None:
        call.expect()
        call.end_within(_timeout(request))
        request_id = request.header(METADATA_KEY) or request.id
        async with ended_by(call.deadline):
            asked = await parsed(request.body, lambda body: self._read(body, request_id))
            call.describe(*(each.prompt for each in asked.requests))
            async with running_all(asked.requests, call) as events:
                answer = _Answer(self._dialect, asked, self._model, request.id, await anext(events))
                finish = await (answer.stream if asked.is_streamed else answer.whole)(events, reply)
        await finish()  # a client that takes its time is not late


class _Answer:
    """The answer to one call, from its first event on."""

    def __init__(
        self, dialect: Dialect, asked: AskedCompletion, model: ServedModel, name: str, first: Numbered
    ) -> None:
        self._dialect, self._asked, self._first = dialect, asked, first
        event = first[1]
        assert isinstance(event, Started), "the first event of a request"
        self._common = {
            "id": dialect.id_prefix + name,
            "created": int(time.time()),
            "model": model.info.name,
            "system_fingerprint": f"step-{event.step}",  # model.info may be of a newer one
        }
        self._usages: dict[int, Usage] = {}

    async def whole(self, events: AsyncIterator[Numbered], reply: Reply) -> Finish:
        """Makes the complete answer; returns what sends it."""
        builders = [CompletionBuilder() for _ in self._asked.requests]
        builders[self._first[0]].add(self._first[1])
        async for number, event in events:
            builders[number].add(event)
        completions = [builder.completion() for builder in builders]
        entries = sum(len(choice.logprobs) for completion in completions for choice in completion.choices)
        if entries <= INLINE_LOGPROBS:
            body = self._body(completions)
        else:
            body = await asyncio.to_thread(self._body, completions)
        return partial(reply.whole, 200, JSON, body)

    def _body(self, completions: Sequence[Completion]) -> bytes:
        """Returns the complete answer in JSON."""
        choices = [
            self._dialect.whole(choice, number * self._asked.samples + choice.index, self._asked.has_logprobs)
            for number, completion in enumerate(completions)
            for choice in completion.choices
        ]
        usage = usage_of([completion.usage for completion in completions])
        answer = {**self._common, "object": self._dialect.whole_object, "choices": choices, "usage": usage}
        return dumped(answer)

    async def stream(self, events: AsyncIterator[Numbered], reply: Reply) -> Finish:
        """Sends the answer in chunks; returns what sends its end."""
        await reply.begin(200, EVENTS, [("cache-control", "no-cache")])
        await self._send(self._first, reply)
        async for numbered in events:
            await self._send(numbered, reply)
        return partial(self._end, reply)

    async def _end(self, reply: Reply) -> None:
        if self._asked.has_usage:
            usages = list(self._usages.values())
            await reply.send(event_of(self._chunk([]) | {"usage": usage_of(usages)}))
        await reply.send(LAST_EVENT)
        await reply.end()

    async def _send(self, numbered: Numbered, reply: Reply) -> None:
        number, event = numbered
        if isinstance(event, Started):
            indexes = range(number * self._asked.samples, (number + 1) * self._asked.samples)
            choices = [choice for index in indexes if (choice := self._dialect.opening(index)) is not None]
        elif isinstance(event, PromptLogprobs):
            choices = []  # neither dialect has them
        else:
            made = self._choice(event, number, number * self._asked.samples + event.index)
            choices = [] if made is None else [made]
        for choice in choices:
            await reply.send(event_of(self._chunk([choice])))

    def _choice(self, event: Delta | Finished, number: int, index: int) -> dict[str, Any] | None:
        """Returns the chunk of an event; None if there is nothing in it to send yet."""
        if isinstance(event, Finished):
            self._count(number, event.usage)
            return self._dialect.chunk(index, "", None, reason_of(event.reason))
        logprobs = None
        if self._asked.has_logprobs:
            logprobs = self._dialect.logprobs(event.logprobs)
        return self._dialect.chunk(index, event.text, logprobs, None) if event.text or logprobs else None

    def _count(self, number: int, usage: Usage) -> None:
        """Adds the tokens of a finished sample to those of its prompt."""
        before = self._usages.get(number)
        tokens = usage.completion_tokens + (0 if before is None else before.completion_tokens)
        self._usages[number] = Usage(usage.prompt_tokens, usage.cached_tokens, tokens)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "object": self._dialect.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._asked.has_usage else chunk


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
