"""The way of a request through the server, whatever the protocol: admission, the engine, and its end in every case."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from ....core.errors import Cancelled
from ...engine.request.prompts import Conversation, check_length
from ...engine.request.request import Request
from ...engine.request.sampling_params import SamplingParams
from ...engine.request.servable import checked_prompt, with_grammar
from ...engine.request.streams import CROWD, EventStream, Wakeups
from ..access.tokens import Caller
from ..engine_protocol import ServedEngine
from ..errors import Draining
from ..metrics.observer import Observer
from ..operations.lifecycle import Lifecycle
from .prompt_reader import PromptReader
from .request_ids import LiveRequests, chosen_id
from .requests import check_request
from .response_size import check_response_size

INLINE_IDS: Final = 8192  # to copy and check so many token ids takes less than a millisecond


class RequestRunner:
    """Runs requests in the engine, for the event loop's thread.

    Attributes:
        engine: the engine.
        lifecycle: the state of the server.
        live: the requests that the engine computes or a handler answers.
        prompts: converts prompts to tokens.
        observer: observes the requests of all protocols that the engine takes.

    Args:
        default_max_new_tokens: the limit for requests that set none; None = up to the model's length.
    """

    def __init__(
        self,
        engine: ServedEngine,
        lifecycle: Lifecycle,
        default_max_new_tokens: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.engine, self.lifecycle, self.observer = engine, lifecycle, observer or Observer()
        self._default_max_new_tokens = default_max_new_tokens
        wakeups = Wakeups(CROWD)
        engine.after_events(wakeups.flush)
        self.live = LiveRequests(wakeups)
        self.prompts = PromptReader(engine)

    @asynccontextmanager
    async def run(
        self, asked: Request, caller: Caller, on_admitted: Callable[[str], Awaitable[object]]
    ) -> AsyncIterator[EventStream]:
        """Runs a request in the engine while the body runs, and yields its events.

        At the end of the body (success, error, cancellation) the request ends in the engine too.

        Args:
            asked: the request.
            caller: who asks.
            on_admitted: is awaited with the request's id when the engine has accepted it.

        Raises:
            TkError: the request is refused; nothing was allocated for it.
        """
        self.lifecycle.check_loaded()
        check_request(asked, self.engine.info, caller)
        self.lifecycle.check_admitting()
        request_id, principal = chosen_id(asked.request_id), caller.principal
        stream = self.live.open(request_id, principal)
        submitted = False
        try:
            async with stream.preparing():
                request = await self._engine_request(asked, request_id, caller)
            self.engine.submit(request, self.observer.begin(request, stream.push))
            submitted = True
            await on_admitted(request_id)
            yield stream
        finally:
            stream.leave()
            if not submitted:
                self.live.discard(request_id, principal)
            elif not stream.ended:
                self.engine.abort(request_id, principal)

    def abort(self, request_id: str, principal: str) -> bool:
        """Ends a live request, whose caller gets CANCELLED; returns False if it is not live."""
        stream = self.live.find(request_id, principal)
        if stream is None:
            return False
        self.engine.abort(request_id, principal)
        stream.interrupt(Cancelled(f"Request {request_id} was ended by an operator."))
        return True

    def end_live_requests(self) -> None:
        """Ends all live requests: their callers get UNAVAILABLE, and their handlers abort them in the engine."""
        for stream in self.live.streams():
            stream.interrupt(Draining("The server ended before the request did; ask another one."))

    async def _engine_request(self, asked: Request, request_id: str, caller: Caller) -> Request:
        """Makes the engine's request; checks options and length before it copies or tokenizes a long prompt."""
        info = self.engine.info
        asked.params.validate(info.vocab_size)
        ids = await self._tokens(asked, caller)
        check_length(len(ids), info.max_model_len)
        params = self._with_default_length(asked.params, len(ids))
        self._check_response_size(params, len(ids) - asked.logprobs_from, asked.at_once)
        made = Request(
            await _checked(ids, info.vocab_size),
            params,
            request_id,
            priority=asked.priority,
            deadline=asked.deadline,
            logprobs_from=asked.logprobs_from,
            principal=caller.principal,
            weight=caller.weight,
            cache=asked.cache,
            is_checked=True,
        )
        if params.constraint is None:
            return made
        return await asyncio.to_thread(with_grammar, made, self.engine.grammars)

    async def _tokens(self, asked: Request, caller: Caller) -> Sequence[int]:
        match asked.prompt:
            case str():
                return await self.prompts.of_text(asked.prompt, asked.special_tokens)
            case Conversation():
                return await self.prompts.of_chat(asked.prompt, caller.principal)
        return asked.prompt  # copied when their number is checked

    def _check_response_size(self, params: SamplingParams, num_prompt: int, at_once: bool) -> None:
        longest = self.prompts.longest_token_bytes
        check_response_size(params, num_prompt, self.engine.info.max_model_len, longest, at_once)

    def _with_default_length(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Sets the server's default limit if the client set none, but never below the client's min_new_tokens."""
        if params.max_new_tokens is not None or self._default_max_new_tokens is None:
            return params
        room = self.engine.info.max_model_len - num_prompt_tokens
        length = min(max(self._default_max_new_tokens, params.min_new_tokens), room)
        return replace(params, max_new_tokens=length) if length > 0 else params


async def _checked(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the token ids of a prompt; see `checked_prompt`."""
    if len(ids) <= INLINE_IDS:
        return checked_prompt(ids, vocab_size)
    return await asyncio.to_thread(checked_prompt, ids, vocab_size)
