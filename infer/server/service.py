"""The service tk.v1.Generation: it converts messages, and lets the runner carry the requests out."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import grpc

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from ..api.wire import completion_to_wire, event_to_wire, model_info_to_wire, score_to_wire
from ..observability.request_record import RequestRecord, trace_of
from ..requests.asked_request import AskedRequest
from ..requests.completion import Completion, CompletionBuilder
from ..requests.score import score_request
from ..requests.streams import EventStream
from .access.callers import Callers
from .access.tokens import Caller
from .request.calls import PlainCalls
from .request.deadline import deadline_of, ended_by
from .request.from_messages import asked_request, prompt_of, score_sides
from .request.request_ids import METADATA_KEY
from .request.request_log import RequestLog
from .request.requests import check_top
from .request.response_size import check_text_size
from .runner import RequestRunner
from .status import answered, client_of

# With 20 alternatives each, so many take a few milliseconds.
INLINE_LOGPROBS: Final = 256
M = TypeVar("M")


@dataclass(frozen=True)
class _ServedCall:
    """A call that runs a request: its caller, its deadline on time.monotonic(), and what the log says of it."""

    context: grpc.aio.ServicerContext
    caller: Caller
    deadline: float | None
    record: RequestRecord

    async def admit(self, request_id: str) -> None:
        """Sends the caller the id of its request, which the engine has accepted."""
        self.record.admit(request_id)
        await self.context.send_initial_metadata(((METADATA_KEY, request_id),))


class GenerationService(pb_grpc.GenerationServicer):
    """The calls of tk.v1.Generation.

    Args:
        runner: runs the requests of the server.
        callers: identifies the callers.
        log: the log of requests.
    """

    def __init__(self, runner: RequestRunner, callers: Callers, log: RequestLog) -> None:
        self._runner, self._callers, self._log = runner, callers, log
        self._plain = PlainCalls(callers, log)

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the events of one request; proto/v1/generation.proto documents this call and those below."""
        async with self._call("Generate", request, context) as call, self._running(request, call) as stream:
            async for event in stream:
                call.record.see(event)
                await context.write(event_to_wire(event))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResult:
        async with (
            self._call("GenerateOnce", request, context) as call,
            self._running(request, call, at_once=True) as stream,
        ):
            return await _converted(completion_to_wire, await _completion(stream, call))

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        async with self._call("Score", request, context) as call:
            self._runner.lifecycle.check_loaded()
            check_top(request.top)
            prompt, continuation = score_sides(request)
            self._log.describe(call.record, prompt)
            scored = score_request(*await self._runner.prompts.of_score(prompt, continuation, request.top), request.top)
            call.record.params, call.record.operation = scored.params, "score"
            asked = AskedRequest(
                scored.prompt,
                scored.params,
                logprobs_from=scored.logprobs_from,
                deadline=call.deadline,
                at_once=True,
            )
            async with self._runner.run(asked, call.caller, call.admit) as stream:
                return await _converted(partial(score_to_wire, top=request.top), await _completion(stream, call))

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenIds:
        async with self._plain.call("Tokenize", context):
            self._runner.lifecycle.check_loaded()
            ids = await self._runner.prompts.of_text(request.text, not request.no_special_tokens)
            return await asyncio.to_thread(pb.TokenIds, ids=ids)

    async def Detokenize(self, request: pb.TokenIds, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        async with self._plain.call("Detokenize", context):
            self._runner.lifecycle.check_loaded()
            tokenizer = self._runner.prompts.tokenizer
            check_text_size(len(request.ids), tokenizer.longest_token_bytes)
            text = await asyncio.to_thread(lambda: tokenizer.decode(list(request.ids), skip_special_tokens=False))
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        async with self._plain.call("GetModelInfo", context):
            self._runner.lifecycle.check_loaded()
            return model_info_to_wire(self._runner.engine.info)

    @asynccontextmanager
    async def _call(
        self, method: str, request: pb.GenerateRequest | pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[_ServedCall]:
        """Answers a call that runs a request in the body, whose errors become statuses and lines of the log."""
        deadline = deadline_of(context.time_remaining())
        async with answered(context):
            caller = self._callers.identify(context.invocation_metadata())
            request_id = request.request_id if isinstance(request, pb.GenerateRequest) else ""
            trace = trace_of(context.invocation_metadata())
            client = client_of(context)
            with self._log.request(method, caller.principal, request_id, trace, client) as record:
                record.deadline = deadline
                async with ended_by(deadline):
                    yield _ServedCall(context, caller, deadline, record)

    def _running(
        self, request: pb.GenerateRequest, call: _ServedCall, at_once: bool = False
    ) -> AbstractAsyncContextManager[EventStream]:
        """Returns the context in which a request runs; its value has the events."""
        self._runner.lifecycle.check_loaded()
        prompt = prompt_of(request)
        self._log.describe(call.record, prompt)
        asked = replace(asked_request(request, prompt), deadline=call.deadline, at_once=at_once)
        call.record.params = asked.params
        return self._runner.run(asked, call.caller, call.admit)


async def _completion(stream: EventStream, call: _ServedCall) -> Completion:
    builder = CompletionBuilder()
    async for event in stream:
        call.record.see(event)
        builder.add(event)
    return builder.completion()


async def _converted(convert: Callable[[Completion], M], completion: Completion) -> M:
    """Converts a completion to its message, beside the event loop if it has many log-probabilities."""
    entries = len(completion.prompt_logprobs) + sum(len(choice.logprobs) for choice in completion.choices)
    if entries <= INLINE_LOGPROBS:
        return convert(completion)
    return await asyncio.to_thread(convert, completion)
