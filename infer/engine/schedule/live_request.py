"""A request while the engine works on it: its samples, its pending events, and the callback that receives them."""

import logging
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ....core.errors import DeadlinePassed, TkError
from ....text.detokenizer import NO_PROMPT, PromptEnd
from ....text.tokenizer import Tokenizer
from ..request.events import (
    PROMPT_LOGPROBS_PER_EVENT,
    Done,
    Event,
    Failed,
    Finished,
    ModelInfo,
    PromptLogprobs,
    Started,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from ..request.request import Request
from ..request.sampling_params import SamplingParams
from ..step.sampler_output import SamplerOutput
from ..step.sampling_rows import SamplingRow
from .samples.block_table import BlockKey, BlockTable, cache_fingerprint, root_digest
from .samples.deltas import DeltaBuilder, Ending
from .samples.proposer import Proposer
from .samples.sample import Output, Sample, ScheduledChunk

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The properties of the served model that all requests of an engine share.

    Attributes:
        tokenizer: the checkpoint's tokenizer; None if it has none.
        eos_token_ids: the token ids that end a sample unless the request ignores them.
        max_model_len: the largest number of tokens of a sample.
        block_size: the number of tokens of a block.
        fingerprint: all that keys and values depend on, beside tokens (see `cache_fingerprint`).
        prefix_cache: whether requests may share blocks with others.
        step: the training step of the weights.
        speculate: the largest number of proposals for the next tokens of a sample.
    """

    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    max_model_len: int
    block_size: int
    fingerprint: str
    prefix_cache: bool
    step: int = 0
    speculate: int = 0

    @staticmethod
    def of(info: ModelInfo, tokenizer: Tokenizer | None, prefix_cache: bool, speculate: int) -> "Served":
        """Returns the properties of a described model."""
        return Served(
            tokenizer=tokenizer,
            eos_token_ids=frozenset(info.eos_token_ids),
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            fingerprint=cache_fingerprint(info),
            prefix_cache=prefix_cache,
            step=info.step,
            speculate=speculate,
        )


class LiveRequest:
    """A submitted request; only the engine's thread uses it.

    Attributes:
        request: the request as submitted.
        seed: the seed of the noise.
        samples: its samples.
        stopping: the token ids that end a sample.

    Args:
        request: the request as submitted.
        arrival: the request's number in the order of submission.
        seed: the seed of the sampling noise, the request's own or drawn.
        served: the properties of the model.
        on_event: the callback that receives the events.
    """

    def __init__(
        self, request: Request, arrival: int, seed: int, served: Served, on_event: Callable[[Event], None]
    ) -> None:
        params, num_prompt = request.params, len(request.token_ids)
        max_new = served.max_model_len - num_prompt if params.max_new_tokens is None else params.max_new_tokens
        max_new = max(1, max_new)  # the scheduler then refuses a prompt without room for a token as too long
        eos_token_ids = frozenset[int]() if params.ignore_eos else served.eos_token_ids
        is_private = request.cache.bypass or not served.prefix_cache
        root = root_digest(
            model=served.fingerprint,
            principal=request.principal,
            salt=request.cache.salt,
            request=arrival if is_private else -1,
        )
        keys: list[BlockKey] = []
        self.request = request
        self.seed = seed
        self.samples = tuple(
            Sample(
                request,
                index,
                arrival,
                seed,
                Output(
                    max_tokens=num_prompt + max_new,
                    matcher=None if request.grammar is None else request.grammar.start(params.keep_special_tokens),
                    has_candidates=request.grammar is not None and has_candidates(params),
                ),
                BlockTable(
                    root=root,
                    is_private=is_private,
                    max_reused=sys.maxsize
                    if index or params.prompt_logprobs is None
                    else max(0, request.logprobs_from - 1),
                    prompt_keys=keys,
                ),
                Proposer(served.speculate) if served.speculate and may_speculate(params) else None,
            )
            for index in range(params.n)
        )
        self._on_event = on_event
        self._tokenizer = served.tokenizer
        end = self._prompt_end()
        self.stopping = eos_token_ids.union(params.stop_token_ids)
        self._outputs = [
            DeltaBuilder(each.index, params, served.tokenizer, eos_token_ids, max_new, each.output.matcher, end)
            for each in self.samples
        ]
        self._num_unfinished = params.n
        self._step = served.step
        self._prompt_logprobs: list[TokenLogprob] = []  # those that no event has yet
        self._next_reported = self._next_scored = request.logprobs_from
        self._submitted = time.monotonic()
        self._scheduled: float | None = None
        self._num_cached = 0
        self._first_token = [0.0] * params.n
        self._due: list[Event] = []
        self._started = False

    @property
    def is_over(self) -> bool:
        """Whether the request's last event is pending or delivered."""
        return self._num_unfinished == 0

    def want(self, chunk: ScheduledChunk, first: int) -> list[SamplingRow]:
        """Returns the rows that score prompt tokens in a chunk, and records that its step begins.

        Args:
            chunk: the scheduled chunk.
            first: the index of the chunk's first token among the step's packed tokens.
        """
        if self._scheduled is None:
            self._scheduled = time.monotonic()
            self._num_cached = chunk.start
        num_top, sample = self.request.params.prompt_logprobs, chunk.sample
        if num_top is None:
            self._start()
            return []
        if sample.index:
            return []
        if self._next_scored == 0:
            first_token = self.request.token_ids[0]
            self._prompt_logprobs.append(TokenLogprob(first_token, None, 0, self._bytes(first_token, True)))
        stop = min(chunk.start + chunk.length + 1, sample.num_prompt)
        wanted = range(max(chunk.start + 1, self._next_scored), stop)
        self._next_scored = max(1, self._next_scored, stop)
        prompt = self.request.token_ids
        return [SamplingRow(first + i - 1 - chunk.start, target=prompt[i], num_top=num_top) for i in wanted]

    def score(self, row: SamplingRow, result: SamplerOutput, index: int) -> None:
        """Takes the result, at `index` of the step's results, of a row that `want` returned."""
        place = self._next_reported + len(self._prompt_logprobs)
        self._prompt_logprobs.append(self._logprob(row.num_top, result, index, place <= self._first_visible))
        if len(self._prompt_logprobs) == PROMPT_LOGPROBS_PER_EVENT:
            self._start()

    def take(self, sample: Sample, position: int, result: SamplerOutput, index: int) -> bool:
        """Takes the token that was chosen for a position of a sample, at `index` of the step's results.

        Returns:
            Whether the sample is complete.
        """
        self._start()
        place = position - sample.num_prompt
        token = sample.output.tokens[place] = int(result.token_ids[index])
        if place == 0:
            self._first_token[sample.index] = time.monotonic()
        num_top = self.request.params.logprobs
        output = self._outputs[sample.index]
        logprob = None if num_top is None else self._logprob(num_top, result, index, output.is_first)
        delta, ending = output.push(token, logprob)
        if delta.text or delta.token_ids:
            self._due.append(delta)
        if ending is not None:
            self._finish(sample, ending)
        return ending is not None

    def fail(self, error: TkError) -> None:
        """Ends the request with an error, which is its last event."""
        self._num_unfinished = 0
        self._started = True
        self._due.append(Failed(error))

    def not_finite(self) -> TkError:
        """Returns the error for logits with NaN or infinity."""
        return TkError(
            f"The model's logits for request {self.request.request_id} are not finite. Serve the model in fp32 "
            "(--dtype fp32); if they are not finite then either, train or convert it again."
        )

    def too_late(self) -> DeadlinePassed:
        """Returns the error for a deadline that has passed, or that will pass before the first token."""
        return DeadlinePassed(
            f"Request {self.request.request_id} is not expected to answer before its deadline. Allow more time or try "
            "again later."
        )

    def deliver(self) -> None:
        """Sends the pending events. If the callback raises, it gets no more events; other requests are not affected."""
        if not self._started:
            return
        events, self._due = self._due, []
        try:
            for event in events:
                self._on_event(event)
        except Exception:
            _LOG.exception("The callback of request %s failed and gets no more events.", self.request.request_id)
            self._on_event = _ignore

    def _start(self) -> None:
        """Makes an event of the log-probabilities of the prompt that are known; the first time this is Started."""
        if self._started and not self._prompt_logprobs:
            return
        known, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        request = self.request
        if self._started:
            self._due.append(PromptLogprobs(self._next_reported, known))
        else:
            self._started = True
            num_prompt = len(request.token_ids)
            self._due.append(Started(request.request_id, num_prompt, self._num_cached, self.seed, known, self._step))
        self._next_reported += len(known)

    def _finish(self, sample: Sample, ending: Ending) -> None:
        now = time.monotonic()
        timing = Timing(
            queue_seconds=(self._scheduled or now) - self._submitted,
            first_token_seconds=self._first_token[sample.index] - self._submitted,
            total_seconds=now - self._submitted,
            preemptions=sample.preemptions,
        )
        usage = Usage(
            prompt_tokens=sample.num_prompt,
            cached_tokens=self._num_cached,
            completion_tokens=self._outputs[sample.index].num_tokens,
            proposed_tokens=sample.output.num_proposed,
            accepted_tokens=sample.output.num_accepted,
        )
        self._due.append(Finished(sample.index, ending.reason, usage, timing, ending.matched))
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._due.append(Done())

    def _prompt_end(self) -> PromptEnd:
        if self._tokenizer is None:
            return NO_PROMPT
        return PromptEnd.of(self._tokenizer, self.request.token_ids, self.request.params.keep_special_tokens)

    @cached_property
    def _first_visible(self) -> int:
        """The place of the prompt's first token that has a text; that of its last one if none has."""
        tokenizer, keep, prompt = self._tokenizer, self.request.params.keep_special_tokens, self.request.token_ids
        if tokenizer is None:
            return 0
        places = (place for place, token in enumerate(prompt) if tokenizer.is_visible(token, keep))
        return next(places, len(prompt) - 1)

    def _logprob(self, num_top: int, result: SamplerOutput, index: int, is_first: bool) -> TokenLogprob:
        token = int(result.token_ids[index])
        top = tuple(
            TopLogprob(int(other), float(logprob), self._bytes(int(other), is_first))
            for other, logprob in zip(
                result.top_ids[index, :num_top], result.top_logprobs[index, :num_top], strict=True
            )
        )
        return TokenLogprob(
            token, float(result.logprob[index]), int(result.rank[index]), self._bytes(token, is_first), top
        )

    def _bytes(self, token: int, is_first: bool) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token, is_first)


def may_speculate(params: SamplingParams) -> bool:
    """Returns whether a request's tokens are proposed: not beside masks, nor beside log-probabilities of the prompt."""
    return params.prompt_logprobs is None and params.constraint is None


def has_candidates(params: SamplingParams) -> bool:
    """Returns whether the best token that a mask allows is the first one allowed among the best without a mask.

    Filters look at the tokens that a mask leaves, a bias may ban the only one, and log-probabilities are of one token.
    """
    is_one_kept = params.temperature == 0 or not params.is_filtered
    return params.logprobs is None and not params.logit_bias and is_one_kept


def seed_of(request: Request) -> int:
    """Returns a request's seed; draws one if it has none."""
    return secrets.randbits(64) if request.params.seed is None else request.params.seed


def _ignore(event: Event) -> None:
    """Ignores an event: replaces a callback that has failed."""
