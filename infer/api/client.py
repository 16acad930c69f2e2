"""A client for `tk serve` with `generate` and `stream` as `LLM` has them. It does not import torch."""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Final, Self

import grpc

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from ..requests.completion import Completion
from ..requests.events import CacheOptions, Delta, Event, ModelInfo
from ..requests.prompts import GivenPrompt, GivenPrompts, as_prompt
from ..requests.sampling_params import SamplingParams
from .attempts import Attempts
from .credentials import Credentials
from .outgoing import detokenize_message, message_for, messages_for, tokenize_message
from .remote_errors import error_from_rpc
from .wire import completion_from_wire, event_from_wire, model_info_from_wire

MAX_IN_FLIGHT: Final = 64


class Client:
    """A connection to a server, usable from any thread and as a context manager.

    If the server is unavailable or its queue is full, the client repeats the call after a growing pause, at least as
    long as the server asks, unless it has already received an event.

    Args:
        target: the server's address, HOST:PORT.
        timeout: the largest number of seconds that a call may take with all its attempts; None = no limit.
        max_attempts: the largest number of attempts of a call.
        credentials: the token and certificates, for a server that wants them; None = neither.

    All methods raise InvalidRequest, Overloaded, Cancelled, DeadlinePassed, Unavailable, or RemoteError for every other
    status.
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
        self._channel = credentials.channel(target)
        self._stub: Any = pb_grpc.GenerationStub(self._channel)

    def generate(
        self,
        prompts: GivenPrompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheOptions | None = None,
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; the server computes many at a time.

        Args:
            prompts: a sequence of prompts, each a str, a list of token ids or a Conversation; one alone is one prompt.
            params: one SamplingParams for all prompts, or one per prompt; None = the defaults.
            cache: the use of the prefix cache; None = the defaults.
        """
        calls: deque[_PendingCall] = deque()
        completions: list[Completion] = []
        try:
            for request in messages_for(prompts, params, cache):
                if len(calls) == MAX_IN_FLIGHT:
                    completions.append(calls.popleft().result())
                calls.append(_PendingCall(self, request))
            while calls:
                completions.append(calls.popleft().result())
        finally:
            for call in calls:
                call.cancel()
        return completions

    def stream(
        self, prompt: GivenPrompt, params: SamplingParams | None = None, cache: CacheOptions | None = None
    ) -> Iterator[Delta]:
        """Yields the Deltas of one prompt as the server sends them; leaving the iterator early ends the request."""
        return _deltas(self.events(prompt, params, cache))

    def events(
        self, prompt: GivenPrompt, params: SamplingParams | None = None, cache: CacheOptions | None = None
    ) -> Generator[Event, None, None]:
        """Yields all events of one prompt: Started, which has the step of the weights, PromptLogprobs of a long prompt
        if asked for, Deltas, and Finished for each sample; else as `stream`."""
        return self._events(message_for(as_prompt(prompt), params or SamplingParams(), cache))

    def model_info(self) -> ModelInfo:
        """Returns the description of the served model."""
        return model_info_from_wire(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text` by the served model's tokenizer."""
        return list(self._call(self._stub.Tokenize, tokenize_message(text, special_tokens)).ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""
        text: str = self._call(self._stub.Detokenize, detokenize_message(token_ids)).text
        return text

    def close(self) -> None:
        """Closes the connection and ends the calls in progress; a second call does nothing."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _events(self, request: pb.GenerateRequest) -> Generator[Event, None, None]:
        attempts = self._attempts()
        while True:
            call = self._stub.Generate(request, timeout=attempts.seconds_left, metadata=self._metadata)
            begun = False
            try:
                for response in call:
                    begun = True
                    if (event := event_from_wire(response)) is not None:
                        yield event
                return
            except grpc.RpcError as error:
                if begun:
                    raise error_from_rpc(error, self._target) from None
                self._wait(error, attempts)
            finally:
                call.cancel()

    def _call(self, method: Any, request: Any) -> Any:
        attempts = self._attempts()
        while True:
            try:
                return method(request, timeout=attempts.seconds_left, metadata=self._metadata)
            except grpc.RpcError as error:
                self._wait(error, attempts)

    def _attempts(self) -> Attempts:
        return Attempts(self._max_attempts, self._timeout)

    def _wait(self, error: grpc.RpcError, attempts: Attempts) -> None:
        """Waits until another attempt makes sense, or raises the error if none does."""
        time.sleep(attempts.pause_after(error_from_rpc(error, self._target)))


def _deltas(events: Generator[Event, None, None]) -> Iterator[Delta]:
    with closing(events):
        yield from (event for event in events if isinstance(event, Delta))


class _PendingCall:
    """A call of GenerateOnce in progress."""

    def __init__(self, client: Client, request: pb.GenerateRequest) -> None:
        self._client, self._request = client, request
        self._attempts = client._attempts()
        self._begin()

    def result(self) -> Completion:
        """Waits for the result; begins the call again if another attempt makes sense."""
        while True:
            try:
                return completion_from_wire(self._future.result())
            except grpc.RpcError as error:
                self._client._wait(error, self._attempts)
            self._begin()

    def cancel(self) -> None:
        """Ends the call."""
        self._future.cancel()

    def _begin(self) -> None:
        client = self._client
        self._future = client._stub.GenerateOnce.future(
            self._request, timeout=self._attempts.seconds_left, metadata=client._metadata
        )
