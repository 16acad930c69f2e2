"""The service inference.GRPCInferenceService: requests come as tensors, and take the same way as those of tk.v1."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from .... import __version__
from ....core.errors import TkError
from ....proto.open_inference import open_inference_pb2 as oip
from ...engine.request.streams import EventStream
from ..call.call import RequestRunner, ServerCall, ended_by
from ..call.checks import check_model
from ..errors import text_for_client
from ..grpc.calls import GrpcCall
from ..grpc.messages import INLINE_BYTES
from ..operations.lifecycle import ServerState
from .answers import StreamedAnswer, config_of, metadata_of, whole_answer
from .inference import Inference, check_version, named_as_given, read_inference

OPEN_INFERENCE: Final = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]
# The requests of one stream that run at a time; the next one is read when one of them has ended.
MAX_AT_ONCE: Final = 16


class OpenInferenceService:
    """The calls of inference.GRPCInferenceService; its .proto documents them.

    Args:
        runner: runs the requests of the server.
    """

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner

    @property
    def _is_ready(self) -> bool:
        return self._runner.lifecycle.state is ServerState.SERVING

    async def ServerLive(self, request: oip.ServerLiveRequest, call: GrpcCall) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=self._runner.lifecycle.state is not ServerState.FAILED)

    async def ServerReady(self, request: oip.ServerReadyRequest, call: GrpcCall) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(self, request: oip.ModelReadyRequest, call: GrpcCall) -> oip.ModelReadyResponse:
        if self._is_ready:
            self._check_model(request)
        return oip.ModelReadyResponse(ready=self._is_ready)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, call: GrpcCall) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="tk", version=__version__)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, call: GrpcCall) -> oip.ModelMetadataResponse:
        self._runner.lifecycle.check_loaded()
        self._check_model(request)
        return metadata_of(self._runner.engine.info)

    async def ModelConfig(self, request: oip.ModelConfigRequest, call: GrpcCall) -> oip.ModelConfigResponse:
        self._runner.lifecycle.check_loaded()
        self._check_model(request)
        return config_of(self._runner.engine.info)

    async def ModelInfer(self, request: oip.ModelInferRequest, call: GrpcCall) -> oip.ModelInferResponse:
        async with self._running(request, call, at_once=True) as (inference, events):
            return whole_answer(inference, await call.completion(events), self._runner.engine.info.name)

    async def ModelStreamInfer(self, requests: AsyncIterator[oip.ModelInferRequest], call: GrpcCall) -> None:
        writing, live = asyncio.Lock(), set[asyncio.Task[None]]()

        async def send(message: oip.ModelStreamInferResponse) -> None:
            async with writing:
                await call.context.write(message)

        try:
            async for request in requests:
                if len(live) == MAX_AT_ONCE:
                    ended, live = await asyncio.wait(live, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*ended)
                live.add(asyncio.create_task(self._answer_one(request, call, send)))
            await asyncio.gather(*live)
        finally:
            for task in live:
                task.cancel()
            await asyncio.gather(*live, return_exceptions=True)

    async def _answer_one(
        self,
        request: oip.ModelInferRequest,
        call: GrpcCall,
        send: Callable[[oip.ModelStreamInferResponse], Awaitable[None]],
    ) -> None:
        """Sends the answer to one request of a stream, or its error: the others go on. The log has a line for each."""
        try:
            with call.part() as part:
                async with self._running(request, part) as (inference, events):
                    answer = StreamedAnswer(inference, self._runner.engine.info.name)
                    async for event in events:
                        part.record.see(event)
                        if (piece := answer.piece(event)) is not None:
                            await send(oip.ModelStreamInferResponse(infer_response=piece))
        except TkError as error:
            text = f"{error.grpc_status}: {text_for_client(error)}"
            of = oip.ModelInferResponse(id=request.id)
            await send(oip.ModelStreamInferResponse(error_message=text, infer_response=of))

    @asynccontextmanager
    async def _running(
        self, message: oip.ModelInferRequest, call: ServerCall, at_once: bool = False
    ) -> AsyncIterator[tuple[Inference, EventStream]]:
        """Runs a request while the body runs; yields what was asked, and its events.

        Args:
            message: the request.
            call: the call, or the part of a stream's call that is for this request.
            at_once: whether the whole answer is one message.

        Raises:
            TkError: the request is refused, or ended by an error.
        """
        call.expect(message.id)
        self._runner.lifecycle.check_loaded()
        inference, info = await _read(message), self._runner.engine.info
        call.describe(inference.request.prompt)
        check_version(inference.version, info.step)
        call.end_within(inference.timeout)
        with named_as_given(inference.names):
            asked = replace(inference.request, at_once=at_once)
            async with ended_by(call.deadline), call.run(asked) as [events]:
                yield inference, events

    def _check_model(self, request: oip.ModelReadyRequest | oip.ModelMetadataRequest | oip.ModelConfigRequest) -> None:
        info = self._runner.engine.info
        check_model(request.name, info)
        check_version(request.version, info.step)


async def _read(message: oip.ModelInferRequest) -> Inference:
    """Reads a request, beside the event loop if it is long: its text is converted more than once."""
    inline = message.ByteSize() <= INLINE_BYTES
    return read_inference(message) if inline else await asyncio.to_thread(read_inference, message)
