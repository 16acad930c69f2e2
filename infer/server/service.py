"""The service tk.v1.Generation: it checks each call, submits it to the engine and sends the events back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from ..api.wire import cache_from_request, completion_to_wire, event_to_wire, model_info_to_wire, params_from_request
from ..requests.completion import CompletionBuilder
from ..requests.events import Request
from ..requests.prompts import check_length
from ..requests.sampling_params import SamplingParams
from ..requests.servable import with_grammar
from ..requests.streams import CROWD, EventStream, Wakeups
from .callers import Callers
from .engine_protocol import ServedEngine
from .errors import Draining, NotBuilt
from .prompt_reader import PromptReader
from .request_ids import METADATA_KEY, LiveRequests, chosen_id
from .requests import check_request, refuse_unknown_fields
from .status import answered
from .tokens import Caller


class GenerationService(pb_grpc.GenerationServicer):
    """The calls of tk.v1.Generation.

    At the end of a call (success, error, cancellation, deadline, lost connection) its request ends in the engine too.

    Attributes:
        live: the requests that the engine computes or a handler answers.
        prompts: converts prompts to tokens.
    """

    def __init__(
        self, engine: ServedEngine, default_max_new_tokens: int | None = None, callers: Callers | None = None
    ) -> None:
        self._engine = engine
        self._callers = callers or Callers()
        self._default_max_new_tokens = default_max_new_tokens
        self._draining = False
        wakeups = Wakeups(CROWD)
        engine.after_events(wakeups.flush)
        self.live = LiveRequests(wakeups)
        self.prompts = PromptReader(engine)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused for good."""
        return self._draining

    def start_draining(self) -> None:
        """Refuses new requests from now on; live requests continue."""
        self._draining = True

    def end_live_requests(self) -> None:
        """Ends all live requests: their callers get UNAVAILABLE, and their handlers abort them in the engine."""
        for stream in self.live.streams():
            stream.interrupt(Draining("The server ended before the request did; ask another one."))

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the events of one request; proto/v1/generation.proto documents this call and those below."""
        async with answered(context), self._running(request, context) as stream:
            async for event in stream:
                await context.write(event_to_wire(event))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResult:
        async with answered(context), self._running(request, context) as stream:
            builder = CompletionBuilder()
            async for event in stream:
                builder.add(event)
            return completion_to_wire(builder.completion())

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        async with answered(context):
            raise NotBuilt("This version of tk does not implement Score yet.")

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenIds:
        async with answered(context):
            refuse_unknown_fields(request)
            return pb.TokenIds(ids=await self.prompts.of_text(request.text, not request.no_special_tokens))

    async def Detokenize(self, request: pb.TokenIds, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        async with answered(context):
            refuse_unknown_fields(request)
            text = await asyncio.to_thread(self.prompts.tokenizer.decode, list(request.ids), skip_special_tokens=False)
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        async with answered(context):
            refuse_unknown_fields(request)
            return model_info_to_wire(self._engine.info)

    @asynccontextmanager
    async def _running(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[EventStream]:
        """Runs a request in the engine while the body runs, and yields its events."""
        deadline = _deadline(context)
        caller = self._callers.identify(context.invocation_metadata())
        check_request(request, self._engine.info, caller)
        if self._draining:
            raise Draining("The server is draining and takes no new requests; ask another one.")
        request_id = chosen_id(request.request_id)
        stream = self.live.open(request_id, caller.principal)
        submitted = False
        try:
            await context.send_initial_metadata(((METADATA_KEY, request_id),))
            engine_request = await self._engine_request(request, request_id, deadline, caller)
            self._engine.submit(engine_request, stream.push)
            submitted = True
            yield stream
        finally:
            stream.leave()
            if not submitted:
                self.live.discard(request_id, caller.principal)
            elif not stream.ended:
                self._engine.abort(request_id, caller.principal)

    async def _engine_request(
        self, request: pb.GenerateRequest, request_id: str, deadline: float | None, caller: Caller
    ) -> Request:
        """Makes the engine's request; checks options and length before it copies or tokenizes a long prompt."""
        info, ids = self._engine.info, request.tokens.ids
        params = params_from_request(request)
        params.validate(info.vocab_size)
        match request.WhichOneof("prompt"):
            case "text":
                ids = await self.prompts.of_text(request.text, not request.no_special_tokens)
            case "chat":
                ids = await self.prompts.of_chat(request.chat)
        check_length(len(ids), info.max_model_len)
        params = self._with_default_length(params, len(ids))
        made = Request(
            request_id,
            tuple(ids),
            params,
            priority=request.priority,
            deadline=deadline,
            principal=caller.principal,
            weight=caller.weight,
            cache=cache_from_request(request),
        )
        if params.constraint is None:
            return made
        return await asyncio.to_thread(with_grammar, made, self._engine.grammars)

    def _with_default_length(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Sets the server's default limit if the client set none, but never below the client's min_new_tokens."""
        if params.max_new_tokens is not None or self._default_max_new_tokens is None:
            return params
        room = self._engine.info.max_model_len - num_prompt_tokens
        length = min(max(self._default_max_new_tokens, params.min_new_tokens), room)
        return replace(params, max_new_tokens=length) if length > 0 else params


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    """Returns the time at which the caller stops waiting, as a value of time.monotonic(), or None."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
