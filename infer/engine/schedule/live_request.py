"""A request while the engine works on it: its samples, its pending events, and the callback that receives them."""

import logging
import secrets
import sys
import time
from collections.abc import Callable
from typing import Final

from ....core.errors import DeadlinePassed, TkError
from ....text.detokenizer import NO_PROMPT, PromptEnd
from ..planning.model_source import ModelSource
from ..request.events import Done, Event, Failed, Finished, PromptLogprobs, Started, Timing, Usage
from ..request.request import Request
from ..request.sampling_params import SamplingParams
from ..step.sampler_output import SamplerOutput
from ..step.sampling_rows import ScoredRow
from .samples.block_table import BlockKey, BlockTable, cache_fingerprint, root_digest
from .samples.deltas import DeltaBuilder, Ending
from .samples.draft_record import DraftRecord
from .samples.logprobs import PromptScores, token_logprob
from .samples.proposer import Proposer
from .samples.sample import Output, Sample, ScheduledChunk

_LOG: Final = logging.getLogger(__name__)


class LiveRequest:
    """A submitted request; only the engine's thread uses it.

    Attributes:
        request: the request as submitted.

    Args:
        request: the request as submitted.
        arrival: the request's number in the order of submission.
        source: the model, and the options of its engine.
        on_event: the callback that receives the events.
    """

    def __init__(self, request: Request, arrival: int, source: ModelSource, on_event: Callable[[Event], None]) -> None:
        params, tokenizer = request.params, source.tokenizer
        eos_token_ids = frozenset(() if params.ignore_eos else source.info.eos_token_ids)
        end = NO_PROMPT
        if tokenizer is not None:
            end = PromptEnd.of(tokenizer, request.token_ids, params.keep_special_tokens)
        self.request = request
        self.samples = _samples(request, arrival, source, eos_token_ids)
        self._source, self._on_event = source, on_event
        self._deltas = [
            DeltaBuilder(
                each.index,
                params,
                tokenizer,
                eos_token_ids,
                each.output.max_tokens - each.num_prompt,
                each.output.matcher,
                end,
            )
            for each in self.samples
        ]
        self._scores = PromptScores(request, tokenizer)
        self._num_unfinished = params.n
        self._submitted = time.monotonic()
        self._scheduled: float | None = None
        self._num_cached = 0
        self._due: list[Event] = []
        self._has_started = False

    @property
    def is_over(self) -> bool:
        """Whether the request's last event is pending or delivered."""
        return self._num_unfinished == 0

    def begin_chunk(self, chunk: ScheduledChunk, first: int) -> list[ScoredRow]:
        """Records that a step with a chunk of the prompt begins, and returns the rows that score tokens in it.

        Args:
            chunk: the scheduled chunk.
            first: the index of the chunk's first token among the step's packed tokens.
        """
        if self._scheduled is None:
            self._scheduled, self._num_cached = time.monotonic(), chunk.start
        if self.request.params.prompt_logprobs is None:
            self._report_prompt()
        return self._scores.rows(chunk, first)

    def add_score(self, row: ScoredRow, result: SamplerOutput, index: int) -> None:
        """Adds the result, at `index` of the step's results, of a row that `begin_chunk` returned."""
        if self._scores.add(row, result, index):
            self._report_prompt()

    def add_token(self, sample: Sample, position: int, token: int, result: SamplerOutput, index: int) -> bool:
        """Adds the token that was chosen for a position of a sample; it is at `index` of the step's results.

        Returns:
            Whether the sample is complete.
        """
        self._report_prompt()
        sample.output.tokens[position - sample.num_prompt] = token
        num_top, deltas, logprob = self.request.params.logprobs, self._deltas[sample.index], None
        if num_top is not None:
            logprob = token_logprob(self._source.tokenizer, num_top, result, index, deltas.is_first)
        delta, ending = deltas.push(token, logprob)
        if delta.text or delta.token_ids:
            self._due.append(delta)
        if ending is not None:
            self._finish(sample, ending)
        return ending is not None

    def fail(self, error: TkError) -> None:
        """Ends the request with an error, which is its last event."""
        self._num_unfinished = 0
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
        events, self._due = self._due, []
        try:
            for event in events:
                self._on_event(event)
        except Exception:
            _LOG.exception("The callback of request %s failed and gets no more events.", self.request.request_id)
            self._on_event = _ignore

    def _report_prompt(self) -> None:
        """Makes an event of the log-probabilities of the prompt that are known; the first time this is Started."""
        if self._has_started and not self._scores.known:
            return
        start, known = self._scores.flush()
        if self._has_started:
            self._due.append(PromptLogprobs(start, known))
            return
        self._has_started = True
        sample, request, step = self.samples[0], self.request, self._source.info.step
        found = request.request_id, sample.num_prompt, self._num_cached, sample.seed, known, step
        self._due.append(Started(*found, request.adapter_digest))

    def _finish(self, sample: Sample, ending: Ending) -> None:
        now, deltas, output = time.monotonic(), self._deltas[sample.index], sample.output
        timing = Timing(
            queue_seconds=(self._scheduled or now) - self._submitted,
            first_token_seconds=deltas.begun - self._submitted,
            total_seconds=now - self._submitted,
            preemptions=sample.preemptions,
        )
        usage = Usage(
            prompt_tokens=sample.num_prompt,
            cached_tokens=self._num_cached,
            completion_tokens=deltas.num_tokens,
            proposed_tokens=output.num_proposed,
            accepted_tokens=output.num_accepted,
        )
        self._due.append(Finished(sample.index, ending.reason, usage, timing, ending.matched))
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._due.append(Done())


def _samples(request: Request, arrival: int, source: ModelSource, eos_token_ids: frozenset[int]) -> tuple[Sample, ...]:
    """Returns the samples of a new request, all of which share its prompt, the keys of its blocks and the seed."""
    params, grammar, num_prompt = request.params, request.grammar, len(request.token_ids)
    options, info = source.options, source.info
    max_new = info.max_model_len - num_prompt if params.max_new_tokens is None else params.max_new_tokens
    is_private = request.cache.bypass or not options.prefix_cache
    root = root_digest(
        model=cache_fingerprint(info),
        principal=request.principal,
        salt=request.cache.salt,
        adapter=request.adapter_digest,
        request=arrival if is_private else -1,
    )
    keys: list[BlockKey] = []
    seed = secrets.randbits(64) if params.seed is None else params.seed
    proposes = options.speculate and params.prompt_logprobs is None  # which do not stand beside proposals
    scored_from = sys.maxsize if params.prompt_logprobs is None else max(0, request.logprobs_from - 1)
    return tuple(
        Sample(
            request,
            index,
            arrival,
            seed,
            Output(
                # The scheduler then refuses a prompt without room for a token as too long.
                max_tokens=num_prompt + max(1, max_new),
                stopping=eos_token_ids.union(params.stop_token_ids),
                matcher=None if grammar is None else grammar.start(params.keep_special_tokens),
                has_candidates=grammar is not None and has_candidates(params),
                draft=DraftRecord() if proposes and options.draft is not None else None,
            ),
            BlockTable(root, is_private, sys.maxsize if index else scored_from, keys),
            Proposer(options.speculate) if proposes and params.constraint is None and options.draft is None else None,
        )
        for index in range(params.n)
    )


def has_candidates(params: SamplingParams) -> bool:
    """Returns whether the best token that a mask allows is the first one allowed among the best without a mask.

    Filters look at the tokens that a mask leaves, a bias may ban the only one, and log-probabilities are of one token.
    """
    is_one_kept = params.temperature == 0 or not params.is_filtered
    return params.logprobs is None and not params.logit_bias and is_one_kept


def _ignore(event: Event) -> None:
    """Ignores an event: replaces a callback that has failed."""
