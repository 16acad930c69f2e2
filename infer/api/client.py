"""A client for `tk serve` with `generate` and `stream` as `LLM` has them. It does not import torch."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

import grpc

from ...core.errors import InvalidRequest, Overloaded
from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from ..requests.completion import Completion
from ..requests.events import CacheOptions, Delta, ModelInfo
from ..requests.prompts import Prompt, as_params, as_prompt, as_prompts, check_options
from ..requests.sampling_params import SamplingParams
from .credentials import Credentials
from .remote_errors import Unavailable, error_from_rpc
from .wire import cache_to_request, completion_from_wire, event_from_wire, model_info_from_wire, params_to_request

MAX_IN_FLIGHT: Final = 64
FIRST_RETRY_SECONDS: Final = 0.2
LONGEST_RETRY_SECONDS: Final = 5.0
_ANY_VOCABULARY: Final = 1 << 32


class Client:
    """A connection to a server, usable from any thread and as a context manager.

    If the server is unavailable or its queue is full, the client repeats the call after a growing pause, unless it has
    already received an event.

    Args:
        target: the server's address, HOST:PORT.
        timeout: the largest number of seconds that a call may take; None = no limit.
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
        self._target, self._max_attempts = target, max_attempts
        credentials = credentials or Credentials()
        self._options: dict[str, Any] = {"timeout": timeout, "metadata": credentials.metadata}  # of every call
        self._channel = credentials.channel(target)
        self._stub: Any = pb_grpc.GenerationStub(self._channel)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheOptions | None = None,
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; the server computes many at a time.

        Args:
            prompts: a sequence of prompts, each a str or a list of token ids; a bare str or flat list is one prompt.
            params: one SamplingParams for all prompts, or one per prompt; None = the defaults.
            cache: the use of the prefix cache; None = the defaults.
        """
        given = as_prompts(prompts)
        chosen = as_params(params, len(given))
        requests = [_request(prompt, one, cache) for prompt, one in zip(given, chosen, strict=True)]
        calls: deque[tuple[pb.GenerateRequest, Any]] = deque()
        completions: list[Completion] = []
        try:
            for request in requests:
                if len(calls) == MAX_IN_FLIGHT:
                    completions.append(self._finish(*calls.popleft()))
                calls.append((request, self._start(request)))
            while calls:
                completions.append(self._finish(*calls.popleft()))
        finally:
            for _, call in calls:
                call.cancel()
        return completions

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, cache: CacheOptions | None = None
    ) -> Iterator[Delta]:
        """Yields the Deltas of one prompt as the server sends them; leaving the iterator early ends the request."""
        request = _request(as_prompt(prompt), params or SamplingParams(), cache)
        return self._stream(request)

    def model_info(self) -> ModelInfo:
        """Returns the description of the served model."""
        return model_info_from_wire(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text` by the served model's tokenizer."""
        with _sendable():
            request = pb.TokenizeRequest(text=text, no_special_tokens=not special_tokens)
        return list(self._call(self._stub.Tokenize, request).ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""
        with _sendable():
            request = pb.TokenIds(ids=token_ids)
        text: str = self._call(self._stub.Detokenize, request).text
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

    def _start(self, request: pb.GenerateRequest) -> Any:
        return self._stub.GenerateOnce.future(request, **self._options)

    def _finish(self, request: pb.GenerateRequest, call: Any) -> Completion:
        """Returns the result of a started call, which it repeats if another attempt makes sense."""
        attempt = 1
        while True:
            try:
                return completion_from_wire(call.result())
            except grpc.RpcError as error:
                self._pause_or_raise(error, attempt)
            call, attempt = self._start(request), attempt + 1

    def _stream(self, request: pb.GenerateRequest) -> Iterator[Delta]:
        for attempt in count(1):
            call = self._stub.Generate(request, **self._options)
            begun = False
            try:
                for response in call:
                    begun = True
                    event = event_from_wire(response)
                    if isinstance(event, Delta):
                        yield event
                return
            except grpc.RpcError as error:
                if begun:
                    raise error_from_rpc(error, self._target) from None
                self._pause_or_raise(error, attempt)
            finally:
                call.cancel()

    def _call(self, method: Any, request: Any) -> Any:
        for attempt in count(1):
            try:
                return method(request, **self._options)
            except grpc.RpcError as error:
                self._pause_or_raise(error, attempt)

    def _pause_or_raise(self, rpc_error: grpc.RpcError, attempt: int) -> None:
        """Waits until another attempt makes sense, or raises the error if none does."""
        error = error_from_rpc(rpc_error, self._target)
        if attempt >= self._max_attempts or not isinstance(error, (Overloaded, Unavailable)):
            raise error from None
        growing = FIRST_RETRY_SECONDS * 2 ** (attempt - 1)
        time.sleep(min(max(error.retry_after or 0.0, growing), LONGEST_RETRY_SECONDS))


def _request(prompt: Prompt, params: SamplingParams, cache: CacheOptions | None) -> pb.GenerateRequest:
    """Builds the request for a prompt.

    Raises:
        InvalidRequest: a value that no server accepts, whatever the size of its vocabulary.
    """
    check_options(params, cache)
    params.validate(_ANY_VOCABULARY)
    request = pb.GenerateRequest()
    with _sendable():
        params_to_request(params, request)
        cache_to_request(cache or CacheOptions(), request)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
            request.tokens.SetInParent()
    return request


@contextmanager
def _sendable() -> Iterator[None]:
    """Turns the error for a value that the wire's types cannot hold (a negative id) into InvalidRequest."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"A value cannot be sent: {error}") from error
