"""Clients for `tk serve`, for threads and for asyncio, with the methods of `LLM`. They do not import torch."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from itertools import islice
from typing import Any, Final, Self, TypeVar, overload

import grpc

from ...proto.v1 import generation_pb2 as pb
from ..engine.request.completion import Completion
from ..engine.request.events import Delta, Event, ModelInfo
from ..engine.request.prompts import GivenPrompt, GivenPrompts, is_one_prompt
from ..engine.request.request import CacheOptions, as_request, as_requests
from ..engine.request.sampling_params import SamplingParams
from ..engine.request.score import Score
from .connection import BlockingConnection, PendingCall, ServerConnection
from .outgoing import detokenize_message, message_for, score_messages, tokenize_message
from .wire import completion_from_wire, event_from_wire, model_info_from_wire, score_from_wire

MAX_IN_FLIGHT: Final = 64
T = TypeVar("T")


class Client(BlockingConnection):
    """A connection to a server, usable from any thread and as a context manager; arguments: see `ServerConnection`.

    All methods raise InvalidRequest, Overloaded, Cancelled, DeadlinePassed, Unavailable, or RemoteError for every other
    status.
    """

    def generate(
        self,
        prompts: GivenPrompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; the server computes many at a time.

        Args:
            prompts: a sequence of prompts, each a str, a list of token ids or a Conversation; one alone is one prompt.
            params: one SamplingParams for all prompts, or one per prompt; None = the defaults.
            cache: the use of the prefix cache; None = the defaults.
            adapter: the name of an adapter that the server has loaded; "" = none.
        """
        messages = [message_for(request) for request in as_requests(prompts, params, cache, adapter)]
        return self._all(self._stub.GenerateOnce, messages, completion_from_wire)

    def stream(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> Iterator[Delta]:
        """Yields the Deltas of one prompt as the server sends them; leaving the iterator early ends the request."""
        return _deltas(self.events(prompt, params, cache, adapter))

    def events(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> Generator[Event, None, None]:
        """Yields all events of one prompt: Started, which has the step of the weights, PromptLogprobs of a long prompt
        if asked for, Deltas, and Finished for each sample; else as `stream`."""
        return self._events(message_for(as_request(prompt, params, cache, adapter)))

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is one text
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], *, adapter: str = ""
    ) -> Score: ...

    @overload
    def score(
        self, prompt: str | Sequence[int], continuation: Sequence[str | Sequence[int]], *, adapter: str = ""
    ) -> list[Score]: ...

    def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
    ) -> Score | list[Score]:
        """Returns the log-probabilities of a continuation of the prompt, or of each of several; see `LLM.score`."""
        scores = self._all(self._stub.Score, score_messages(prompt, continuation, adapter), score_from_wire)
        return scores[0] if is_one_prompt(continuation) else scores

    def model_info(self) -> ModelInfo:
        """Returns the description of the served model."""
        return model_info_from_wire(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text` by the served model's tokenizer."""
        return list(self._call(self._stub.Tokenize, tokenize_message(text, special_tokens)).ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""
        return str(self._call(self._stub.Detokenize, detokenize_message(token_ids)).text)

    def _events(self, request: pb.GenerateRequest) -> Generator[Event, None, None]:
        attempts = self._attempts()
        while True:
            call = self._stub.Generate(request, timeout=attempts.seconds_left, metadata=self._metadata)
            try:
                for response in call:
                    attempts.stop()  # the caller has a part of the answer
                    if (event := event_from_wire(response)) is not None:
                        yield event
                        self._home.require()  # a fork may go on with the iterator
                return
            except grpc.RpcError as error:
                time.sleep(self._pause(error, attempts))
            finally:
                if self._home.is_here:
                    call.cancel()

    def _all(self, method: Any, requests: Sequence[Any], convert: Callable[[Any], T]) -> list[T]:
        """Returns the converted answers to several calls, in order; if one fails, the others end."""
        begun = (PendingCall(self, method, request) for request in requests)
        calls: deque[PendingCall] = deque()
        answers: list[T] = []
        try:
            calls.extend(islice(begun, MAX_IN_FLIGHT))
            while calls:
                answers.append(convert(calls.popleft().result()))
                calls.extend(islice(begun, 1))
        finally:
            for call in calls:
                call.cancel()
        return answers


class AsyncClient(ServerConnection):
    """A connection to a server, for the coroutines of one event loop; `async with` closes it at the end.

    A coroutine that is cancelled ends its request on the server. Arguments, attempts and errors are those of `Client`.
    """

    _is_asynchronous = True

    async def generate(
        self,
        prompts: GivenPrompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; if one fails, the calls of the others end."""
        messages = [message_for(request) for request in as_requests(prompts, params, cache, adapter)]
        return await self._all(self._stub.GenerateOnce, messages, completion_from_wire)

    async def stream(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Yields the Deltas of one prompt as the server sends them.

        If the reader leaves before the end, the request ends when the iterator is closed: at once with
        `contextlib.aclosing`, else when nothing refers to it.
        """
        async with aclosing(self.events(prompt, params, cache, adapter)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def events(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> AsyncGenerator[Event, None]:
        """Yields all events of one prompt, see `Client.events`; else as `stream`."""
        request = message_for(as_request(prompt, params, cache, adapter))
        attempts = self._attempts()
        while True:
            call = self._stub.Generate(request, timeout=attempts.seconds_left, metadata=self._metadata)
            try:
                async for response in call:
                    attempts.stop()  # the caller has a part of the answer
                    if (event := event_from_wire(response)) is not None:
                        yield event
                return
            except grpc.RpcError as error:
                await asyncio.sleep(self._pause(error, attempts))
            finally:
                call.cancel()

    @overload
    async def score(  # type: ignore[overload-overlap]  # a str is one text
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], *, adapter: str = ""
    ) -> Score: ...

    @overload
    async def score(
        self, prompt: str | Sequence[int], continuation: Sequence[str | Sequence[int]], *, adapter: str = ""
    ) -> list[Score]: ...

    async def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
    ) -> Score | list[Score]:
        """Returns the log-probabilities of one or several continuations; see `LLM.score`."""
        scores = await self._all(self._stub.Score, score_messages(prompt, continuation, adapter), score_from_wire)
        return scores[0] if is_one_prompt(continuation) else scores

    async def model_info(self) -> ModelInfo:
        """Returns the description of the served model."""
        return model_info_from_wire(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text` by the served model's tokenizer."""
        return list((await self._call(self._stub.Tokenize, tokenize_message(text, special_tokens))).ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""
        return str((await self._call(self._stub.Detokenize, detokenize_message(token_ids))).text)

    async def close(self) -> None:
        """Closes the connection and ends the calls in progress; a second call does nothing."""
        if self._home.is_here:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any) -> Any:
        attempts = self._attempts()
        while True:
            try:
                return await method(request, timeout=attempts.seconds_left, metadata=self._metadata)
            except grpc.RpcError as error:
                await asyncio.sleep(self._pause(error, attempts))

    async def _all(self, method: Any, requests: Sequence[Any], convert: Callable[[Any], T]) -> list[T]:
        gate = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def answer(request: Any) -> T:
            async with gate:
                return convert(await self._call(method, request))

        return await gather(answer(request) for request in requests)


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of coroutines that run together, in order; if one fails, the others end."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _deltas(events: Generator[Event, None, None]) -> Iterator[Delta]:
    with closing(events):
        yield from (event for event in events if isinstance(event, Delta))
