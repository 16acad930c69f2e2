"""`Client` for asyncio: the same methods with `await` and `async for`, any number of them at a time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import grpc

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from ..requests.completion import Completion
from ..requests.events import CacheOptions, Delta, Event, ModelInfo
from ..requests.prompts import GivenPrompt, GivenPrompts, as_prompt
from ..requests.sampling_params import SamplingParams
from .attempts import Attempts
from .client import MAX_IN_FLIGHT
from .credentials import Credentials
from .outgoing import detokenize_message, message_for, messages_for, tokenize_message
from .remote_errors import error_from_rpc
from .wire import completion_from_wire, event_from_wire, model_info_from_wire


class AsyncClient:
    """A connection to a server, for the coroutines of one event loop; `async with` closes it at the end.

    A coroutine that is cancelled ends its request on the server. Arguments, attempts and errors are those of `Client`.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float | None = None,
        max_attempts: int = 4,
        credentials: Credentials | None = None,
    ) -> None:
        credentials = credentials or Credentials()
        self._target, self._timeout, self._max_attempts = target, timeout, max_attempts
        self._metadata = credentials.metadata
        self._channel = credentials.channel(target, asynchronous=True)
        self._stub: Any = pb_grpc.GenerationStub(self._channel)

    async def generate(
        self,
        prompts: GivenPrompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheOptions | None = None,
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; if one fails, the calls of the others end."""
        gate = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def complete(request: pb.GenerateRequest) -> Completion:
            async with gate:
                return completion_from_wire(await self._call(self._stub.GenerateOnce, request))

        tasks = [asyncio.ensure_future(complete(request)) for request in messages_for(prompts, params, cache)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def stream(
        self, prompt: GivenPrompt, params: SamplingParams | None = None, cache: CacheOptions | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yields the Deltas of one prompt as the server sends them.

        If the reader leaves before the end, the request ends when the iterator is closed: at once with
        `contextlib.aclosing`, else when nothing refers to it.
        """
        async with aclosing(self.events(prompt, params, cache)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def events(
        self, prompt: GivenPrompt, params: SamplingParams | None = None, cache: CacheOptions | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yields all events of one prompt, see `Client.events`; else as `stream`."""
        request = message_for(as_prompt(prompt), params or SamplingParams(), cache)
        attempts = self._attempts()
        while True:
            call = self._stub.Generate(request, timeout=attempts.seconds_left, metadata=self._metadata)
            begun = False
            try:
                async for response in call:
                    begun = True
                    if (event := event_from_wire(response)) is not None:
                        yield event
                return
            except grpc.RpcError as error:
                if begun:
                    raise error_from_rpc(error, self._target) from None
                await self._wait(error, attempts)
            finally:
                call.cancel()

    async def model_info(self) -> ModelInfo:
        """Returns the description of the served model."""
        return model_info_from_wire(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text` by the served model's tokenizer."""
        return list((await self._call(self._stub.Tokenize, tokenize_message(text, special_tokens))).ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""
        text: str = (await self._call(self._stub.Detokenize, detokenize_message(token_ids))).text
        return text

    async def close(self) -> None:
        """Closes the connection and ends the calls in progress; a second call does nothing."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any) -> Any:
        attempts = self._attempts()
        while True:
            try:
                return await method(request, timeout=attempts.seconds_left, metadata=self._metadata)
            except grpc.RpcError as error:
                await self._wait(error, attempts)

    def _attempts(self) -> Attempts:
        return Attempts(self._max_attempts, self._timeout)

    async def _wait(self, error: grpc.RpcError, attempts: Attempts) -> None:
        """Waits until another attempt makes sense, or raises the error if none does."""
        await asyncio.sleep(attempts.pause_after(error_from_rpc(error, self._target)))
