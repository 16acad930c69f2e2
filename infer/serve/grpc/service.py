"""The service tk.v1.Generation: messages become requests, events become messages, and the runner does the rest."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from ....core.errors import InvalidRequest
from ....proto.v1 import generation_pb2 as pb
from ....proto.v1 import generation_pb2_grpc as pb_grpc
from ...client.chat_wire import chat_from_wire
from ...client.wire import (
    cache_from_request,
    completion_to_wire,
    event_to_wire,
    model_info_to_wire,
    params_from_request,
    score_to_wire,
)
from ...engine.request.prompts import GivenPrompt
from ...engine.request.request import Request
from ...engine.request.score import score_request
from ...engine.request.streams import EventStream
from ..call.call import RequestRunner, converted
from ..call.checks import check_counts, check_top
from .calls import GrpcCall

GENERATION: Final = pb.DESCRIPTOR.services_by_name["Generation"]
# With 20 alternatives each, so many take a few milliseconds.
INLINE_LOGPROBS: Final = 256
M = TypeVar("M")


class GenerationService(pb_grpc.GenerationServicer):
    """The calls of tk.v1.Generation.

    Args:
        runner: runs the requests of the server.
    """

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner

    async def Generate(self, request: pb.GenerateRequest, call: GrpcCall) -> None:
        """Streams the events of one request; proto/v1/generation.proto documents this call and those below."""
        async with self._running(request, call) as [stream]:
            async for event in stream:
                call.record.see(event)
                await call.context.write(event_to_wire(event))

    async def GenerateOnce(self, request: pb.GenerateRequest, call: GrpcCall) -> pb.GenerateResult:
        async with self._running(request, call, at_once=True) as [stream]:
            return await converted(completion_to_wire, await call.completion(stream))

    async def Score(self, request: pb.ScoreRequest, call: GrpcCall) -> pb.ScoreResponse:
        call.expect()
        self._runner.lifecycle.check_loaded()
        check_top(request.top)
        prompt, continuation = score_sides(request)
        call.describe(prompt)
        sides = await self._runner.prompts.of_score(prompt, continuation, request.top)
        scored = score_request(*sides, request.top, request.adapter)
        call.record.terms.operation = "score"
        async with call.run(replace(scored, at_once=True)) as [stream]:
            return await converted(partial(score_to_wire, top=request.top), await call.completion(stream))

    async def Tokenize(self, request: pb.TokenizeRequest, call: GrpcCall) -> pb.TokenIds:
        self._runner.lifecycle.check_loaded()
        ids = await self._runner.prompts.of_text(request.text, not request.no_special_tokens)
        return await asyncio.to_thread(pb.TokenIds, ids=ids)

    async def Detokenize(self, request: pb.TokenIds, call: GrpcCall) -> pb.DetokenizeResponse:
        self._runner.lifecycle.check_loaded()
        return pb.DetokenizeResponse(text=await self._runner.prompts.text_of(request.ids))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, call: GrpcCall) -> pb.ModelInfo:
        self._runner.lifecycle.check_loaded()
        return model_info_to_wire(self._runner.engine.info)

    def _running(
        self, request: pb.GenerateRequest, call: GrpcCall, at_once: bool = False
    ) -> AbstractAsyncContextManager[list[EventStream]]:
        """Returns the context in which a request runs; its value has the events."""
        call.expect(request.request_id)
        self._runner.lifecycle.check_loaded()
        prompt = prompt_of(request)
        call.describe(prompt)
        return call.run(replace(asked_request(request, prompt), at_once=at_once))


def asked_request(message: pb.GenerateRequest, prompt: GivenPrompt) -> Request:
    """Returns the request of a message, without a deadline.

    Args:
        message: the message, of which all but the prompt is read.

    Raises:
        InvalidRequest: a list or text is too long.
    """
    stopping, cache = message.stopping, cache_from_request(message)
    check_counts(len(message.sampling.logit_bias), len(stopping.stop), len(stopping.stop_token_ids), cache.salt)
    return Request(
        prompt,
        params_from_request(message),
        model=message.model,
        request_id=message.request_id,
        special_tokens=not message.no_special_tokens,
        priority=message.priority,
        cache=cache,
        adapter=message.adapter,
    )


def prompt_of(message: pb.GenerateRequest) -> GivenPrompt:
    """Returns the prompt of a request; long lists of token ids are not copied.

    Raises:
        InvalidRequest: there is none, or a wrong conversation.
    """
    match message.WhichOneof("prompt"):
        case "text":
            text: str = message.text
            return text
        case "tokens":
            ids: Sequence[int] = message.tokens.ids
            return ids
        case "chat":
            return chat_from_wire(message.chat)
    raise InvalidRequest("The request has no prompt; set text, tokens or chat.", field="prompt")


def score_sides(message: pb.ScoreRequest) -> tuple[str | Sequence[int], str | Sequence[int]]:
    """Returns the prompt and the continuation of a request for a score.

    Raises:
        InvalidRequest: one of them is missing.
    """
    return _side(message, "prompt"), _side(message, "continuation")


def _side(message: pb.ScoreRequest, side: str) -> str | Sequence[int]:
    arm = message.WhichOneof(side)
    if arm is None:
        raise InvalidRequest(f"The request has no {side}; set text or tokens.", field=side)
    value = getattr(message, arm)
    given: str | Sequence[int] = value if isinstance(value, str) else value.ids
    return given
