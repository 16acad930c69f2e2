"""The service inference.GRPCInferenceService: requests come as tensors, and take the same way as those of tk.v1."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import grpc

from .... import __version__
from ....core.errors import TkError
from ....proto.open_inference import open_inference_pb2 as oip
from ...observability.request_record import RequestRecord, trace_of
from ...requests.completion import CompletionBuilder
from ...requests.streams import EventStream
from ..access.callers import Callers
from ..lifecycle.lifecycle import ServerState
from ..request.calls import PlainCalls
from ..request.deadline import deadline_of, ended_by
from ..request.messages import INLINE_BYTES
from ..request.request_ids import METADATA_KEY
from ..request.request_log import RequestLog
from ..request.requests import check_model
from ..runner import RequestRunner
from ..status import answered, client_of, text_for_client
from .answers import StreamedAnswer, metadata_of, whole_answer
from .inference import Inference, check_version, named_as_given, read_inference

OPEN_INFERENCE: Final = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]
# The requests of one stream that run at a time; the next one is read when one of them has ended.
MAX_AT_ONCE: Final = 16


@dataclass(frozen=True)
class _RunningInference:
    """A request that runs: what was asked, its events, and what the log says of it."""

    inference: Inference
    events: EventStream
    record: RequestRecord


class OpenInferenceService:
    """The calls of inference.GRPCInferenceService; its .proto documents them.

    Args:
        runner: runs the requests of the server.
        callers: identifies the callers.
        log: the log of requests.
    """

    def __init__(self, runner: RequestRunner, callers: Callers, log: RequestLog) -> None:
        self._runner, self._callers, self._log = runner, callers, log
        self._plain = PlainCalls(callers, log)

    @property
    def _is_ready(self) -> bool:
        return self._runner.lifecycle.state is ServerState.SERVING

    async def ServerLive(
        self, request: oip.ServerLiveRequest, context: grpc.aio.ServicerContext
    ) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=self._runner.lifecycle.state is not ServerState.FAILED)

    async def ServerReady(
        self, request: oip.ServerReadyRequest, context: grpc.aio.ServicerContext
    ) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(
        self, request: oip.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> oip.ModelReadyResponse:
        async with self._plain.call("ModelReady", context):
            if self._is_ready:
                self._check_model(request)
            return oip.ModelReadyResponse(ready=self._is_ready)

    async def ServerMetadata(
        self, request: oip.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="tk", version=__version__)

    async def ModelMetadata(
        self, request: oip.ModelMetadataRequest, context: grpc.aio.ServicerContext
    ) -> oip.ModelMetadataResponse:
        async with self._plain.call("ModelMetadata", context):
            self._runner.lifecycle.check_loaded()
            self._check_model(request)
            return metadata_of(self._runner.engine.info)

    async def ModelInfer(
        self, request: oip.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> oip.ModelInferResponse:
        async def admit(request_id: str) -> None:
            await context.send_initial_metadata(((METADATA_KEY, request_id),))

        async with answered(context), self._running("ModelInfer", request, context, admit) as run:
            builder = CompletionBuilder()
            async for event in run.events:
                run.record.see(event)
                builder.add(event)
            return whole_answer(run.inference, builder.completion(), self._runner.engine.info.name)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[oip.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> None:
        writing, live = asyncio.Lock(), set[asyncio.Task[None]]()

        async def send(message: oip.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(message)

        async with answered(context):
            try:
                async for request in requests:
                    if len(live) == MAX_AT_ONCE:
                        ended, live = await asyncio.wait(live, return_when=asyncio.FIRST_COMPLETED)
                        await asyncio.gather(*ended)
                    live.add(asyncio.create_task(self._answer_one(request, context, send)))
                await asyncio.gather(*live)
            finally:
                for task in live:
                    task.cancel()
                await asyncio.gather(*live, return_exceptions=True)

    async def _answer_one(
        self,
        request: oip.ModelInferRequest,
        context: grpc.aio.ServicerContext,
        send: Callable[[oip.ModelStreamInferResponse], Awaitable[None]],
    ) -> None:
        """Sends the answer to one request of a stream, or its error: the others go on."""
        try:
            async with self._running("ModelStreamInfer", request, context) as run:
                answer = StreamedAnswer(run.inference, self._runner.engine.info.name)
                async for event in run.events:
                    run.record.see(event)
                    if (piece := answer.piece(event)) is not None:
                        await send(oip.ModelStreamInferResponse(infer_response=piece))
        except TkError as error:
            text = f"{error.grpc_status}: {text_for_client(error)}"
            of = oip.ModelInferResponse(id=request.id)
            await send(oip.ModelStreamInferResponse(error_message=text, infer_response=of))

    @asynccontextmanager
    async def _running(
        self,
        method: str,
        message: oip.ModelInferRequest,
        context: grpc.aio.ServicerContext,
        on_admitted: Callable[[str], Awaitable[None]] | None = None,
    ) -> AsyncIterator[_RunningInference]:
        """Runs a request while the body runs.

        Args:
            method: the call.
            message: the request.
            context: the call's.
            on_admitted: is awaited with the request's id when the engine has accepted it; None = it streams.

        Raises:
            TkError: the request is refused, or ended by an error.
        """
        metadata = context.invocation_metadata()
        caller = self._callers.identify(metadata)
        client = client_of(context)
        with self._log.request(method, caller.principal, message.id, trace_of(metadata), client) as record:
            self._runner.lifecycle.check_loaded()
            inference, info = await _read(message), self._runner.engine.info
            self._log.describe(record, inference.request.prompt)
            check_version(inference.version, info.step)
            deadline = record.deadline = deadline_of(context.time_remaining(), inference.timeout)

            async def admit(request_id: str) -> None:
                record.admit(request_id)
                if on_admitted is not None:
                    await on_admitted(request_id)

            with named_as_given(inference.names):
                asked = replace(inference.request, deadline=deadline, at_once=on_admitted is not None)
                record.params = asked.params
                async with ended_by(deadline), self._runner.run(asked, caller, admit) as stream:
                    yield _RunningInference(inference, stream, record)

    def _check_model(self, request: oip.ModelReadyRequest | oip.ModelMetadataRequest) -> None:
        info = self._runner.engine.info
        check_model(request.name, info)
        check_version(request.version, info.step)


async def _read(message: oip.ModelInferRequest) -> Inference:
    """Reads a request, beside the event loop if it is long: its text is converted more than once."""
    inline = message.ByteSize() <= INLINE_BYTES
    return read_inference(message) if inline else await asyncio.to_thread(read_inference, message)
