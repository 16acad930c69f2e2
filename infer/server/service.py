"""The service tk.v1.Generation: it converts messages, and lets the runner carry the requests out."""

import asyncio
import time
from contextlib import AbstractAsyncContextManager

import grpc

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from ..api.wire import (
    cache_from_request,
    completion_to_wire,
    event_to_wire,
    model_info_to_wire,
    params_from_request,
    score_to_wire,
)
from ..observability.observer import TRACE_HEADERS
from ..requests.completion import Completion, CompletionBuilder
from ..requests.score import score_request
from ..requests.streams import EventStream
from .callers import Callers
from .request_ids import METADATA_KEY
from .requests import check_request
from .runner import AskedRequest, RequestRunner
from .status import answered
from .tokens import Caller


class GenerationService(pb_grpc.GenerationServicer):
    """The calls of tk.v1.Generation.

    Args:
        runner: runs the requests of the server.
        callers: identifies the callers.
    """

    def __init__(self, runner: RequestRunner, callers: Callers) -> None:
        self._runner, self._callers = runner, callers

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the events of one request; proto/v1/generation.proto documents this call and those below."""
        async with answered(context), self._running(request, context) as stream:
            async for event in stream:
                await context.write(event_to_wire(event))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResult:
        async with answered(context), self._running(request, context, at_once=True) as stream:
            return completion_to_wire(await _completion(stream))

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        async with answered(context):
            with self._runner.observer.refusals():
                deadline, caller = self._begin(context)
                scored = score_request(*await self._runner.prompts.of_score(request), top=request.top)
            asked = AskedRequest(
                caller,
                scored.prompt,
                scored.params,
                logprobs_from=scored.logprobs_from,
                deadline=deadline,
                at_once=True,
                trace=_trace(context),
            )
            async with self._admitted(asked, context) as stream:
                return score_to_wire(await _completion(stream), request.top)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenIds:
        async with answered(context):
            self._runner.lifecycle.check_loaded()
            ids = await self._runner.prompts.of_text(request.text, not request.no_special_tokens)
            return await asyncio.to_thread(pb.TokenIds, ids=ids)

    async def Detokenize(self, request: pb.TokenIds, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        async with answered(context):
            self._runner.lifecycle.check_loaded()
            tokenizer = self._runner.prompts.tokenizer
            text = await asyncio.to_thread(lambda: tokenizer.decode(list(request.ids), skip_special_tokens=False))
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        async with answered(context):
            self._runner.lifecycle.check_loaded()
            return model_info_to_wire(self._runner.engine.info)

    def _running(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, at_once: bool = False
    ) -> AbstractAsyncContextManager[EventStream]:
        """Returns the context in which a request runs; its value has the events."""
        with self._runner.observer.refusals():
            asked = self._asked(request, context, at_once)
        return self._admitted(asked, context)

    def _asked(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, at_once: bool) -> AskedRequest:
        deadline, caller = self._begin(context)
        check_request(request, self._runner.engine.info, caller)
        return AskedRequest(
            caller,
            getattr(request, request.WhichOneof("prompt") or "text"),
            params_from_request(request),
            request_id=request.request_id,
            special_tokens=not request.no_special_tokens,
            priority=request.priority,
            deadline=deadline,
            cache=cache_from_request(request),
            at_once=at_once,
            trace=_trace(context),
        )

    def _begin(self, context: grpc.aio.ServicerContext) -> tuple[float | None, Caller]:
        """Returns the deadline of a call for the engine, on time.monotonic(), and its caller."""
        remaining = context.time_remaining()
        self._runner.lifecycle.check_loaded()
        deadline = None if remaining is None else time.monotonic() + remaining
        return deadline, self._callers.identify(context.invocation_metadata())

    def _admitted(
        self, asked: AskedRequest, context: grpc.aio.ServicerContext
    ) -> AbstractAsyncContextManager[EventStream]:
        return self._runner.run(asked, lambda request_id: context.send_initial_metadata(((METADATA_KEY, request_id),)))


def _trace(context: grpc.aio.ServicerContext) -> dict[str, str]:
    """Returns the trace context that the caller sent."""
    return {name: value for name, value in context.invocation_metadata() if name in TRACE_HEADERS}


async def _completion(stream: EventStream) -> Completion:
    builder = CompletionBuilder()
    async for event in stream:
        builder.add(event)
    return builder.completion()
