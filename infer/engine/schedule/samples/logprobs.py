"""Log-probabilities of tokens for events: of those of a prompt as its chunks are computed, and of new ones."""

from functools import cached_property

from .....text.tokenizer import Tokenizer
from ...request.events import PROMPT_LOGPROBS_PER_EVENT, TokenLogprob, TopLogprob
from ...request.request import Request
from ...step.sampler_output import SamplerOutput
from ...step.sampling_rows import ScoredRow
from .sample import ScheduledChunk


def token_logprob(
    tokenizer: Tokenizer | None, num_top: int, result: SamplerOutput, index: int, is_first: bool
) -> TokenLogprob:
    """Returns the log-probability of a row's token, and its alternatives.

    Args:
        tokenizer: the checkpoint's tokenizer, or None.
        num_top: the number of alternatives.
        result: the results of a step.
        index: the row's index among them.
        is_first: whether no token before has a text.
    """

    def spelled(token: int) -> bytes:
        return b"" if tokenizer is None else tokenizer.token_bytes(token, is_first)

    top = zip(result.top_ids[index, :num_top].tolist(), result.top_logprobs[index, :num_top].tolist(), strict=True)
    alternatives = tuple(TopLogprob(other, logprob, spelled(other)) for other, logprob in top)
    token = int(result.token_ids[index])
    return TokenLogprob(token, float(result.logprob[index]), int(result.rank[index]), spelled(token), alternatives)


class PromptScores:
    """The rows that score the tokens of a prompt, and their results.

    Attributes:
        known: the log-probabilities that no event has yet.

    Args:
        request: the request, whose params may ask for none.
        tokenizer: the checkpoint's tokenizer, or None.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._next_reported = self._next_scored = request.logprobs_from
        self.known: list[TokenLogprob] = []

    def rows(self, chunk: ScheduledChunk, first: int) -> list[ScoredRow]:
        """Returns the rows that score tokens in a chunk, whose first token has the index `first` in the step."""
        num_top, sample, prompt = self._request.params.prompt_logprobs, chunk.sample, self._request.token_ids
        if num_top is None or sample.index:
            return []
        if self._next_scored == 0:
            spelled = b"" if self._tokenizer is None else self._tokenizer.token_bytes(prompt[0], True)
            self.known.append(TokenLogprob(prompt[0], None, 0, spelled))
        stop = min(chunk.start + chunk.length + 1, sample.num_prompt)
        wanted = range(max(chunk.start + 1, self._next_scored), stop)
        self._next_scored = max(1, self._next_scored, stop)
        return [ScoredRow(first + i - 1 - chunk.start, target=prompt[i], num_top=num_top) for i in wanted]

    def add(self, row: ScoredRow, result: SamplerOutput, index: int) -> bool:
        """Adds the result, at `index` of a step's results, of a row; returns whether they fill an event."""
        is_first = self._next_reported + len(self.known) <= self._first_visible
        self.known.append(token_logprob(self._tokenizer, row.num_top, result, index, is_first))
        return len(self.known) == PROMPT_LOGPROBS_PER_EVENT

    def flush(self) -> tuple[int, tuple[TokenLogprob, ...]]:
        """Returns the place of the first one that no event has, and all of these, which one has from now on."""
        start, known = self._next_reported, tuple(self.known)
        self._next_reported, self.known = start + len(known), []
        return start, known

    @cached_property
    def _first_visible(self) -> int:
        """The place of the prompt's first token that has a text; that of its last one if none has."""
        tokenizer, keep, prompt = self._tokenizer, self._request.params.keep_special_tokens, self._request.token_ids
        if tokenizer is None:
            return 0
        places = (place for place, token in enumerate(prompt) if tokenizer.is_visible(token, keep))
        return next(places, len(prompt) - 1)
