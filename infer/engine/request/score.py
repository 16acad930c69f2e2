"""The score of a continuation, the same from engines and clients: its request, and the result of it.

The engine reports log-probabilities of prompts. The request for a score has all tokens but the last as its prompt; a
bias makes the last token the only possible new one, so a score needs no more room in the cache than its tokens.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ....core.errors import InvalidRequest
from .completion import Completion
from .events import TokenLogprob
from .prompts import Conversation, Encoder, GivenPrompt, Prompt, as_prompt, prompt_tokens
from .request import Request
from .sampling_params import SamplingParams

_FORCED: Final = 1e9  # the bias of the last token; no logit comes near it


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a continuation.

    Attributes:
        token_ids: the tokens of the continuation.
        logprobs: the natural-log probability of each token after all tokens before it, from the raw logits.
        greedy_token_ids: the most probable token at each place, the lowest id of equals.
        prompt_tokens: how many tokens the prompt has before the first scored one.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy_token_ids: tuple[int, ...]
    prompt_tokens: int

    @property
    def total(self) -> float:
        """The sum of `logprobs`: the log-probability of the whole continuation."""
        return sum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding of the prompt gives this continuation."""
        return self.token_ids == self.greedy_token_ids


def split_tokens(
    tokenizer: Encoder | None, prompt: Prompt, continuation: Prompt
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens of prompt and continuation.

    Two texts are tokenized together. Tokens that are wholly in the prompt are the prompt's; the first token of the
    continuation may begin in the prompt. A text after token ids or a conversation is tokenized without special tokens.

    Raises:
        InvalidRequest: there is text and no tokenizer, or prompt or continuation have no tokens.
    """
    if isinstance(continuation, Conversation):
        raise InvalidRequest("The continuation is a Conversation; it must be text or token ids.", field="continuation")
    if isinstance(prompt, str) and isinstance(continuation, str) and tokenizer is not None:
        whole, num_prompt = tokenizer.encode_pair(prompt, continuation)
        before, after = tuple(whole[:num_prompt]), tuple(whole[num_prompt:])
    else:
        before = prompt_tokens(tokenizer, prompt)
        after = prompt_tokens(tokenizer, continuation, special_tokens=False)
    if not after:
        raise InvalidRequest("The continuation has no tokens; a score needs at least one.", field="continuation")
    if not before:
        raise InvalidRequest(
            "The prompt has no tokens of its own; a score needs at least one. A text that becomes part of the "
            "continuation's first token is none.",
            field="prompt",
        )
    return before, after


def score_request(prompt: Sequence[int], continuation: Sequence[int], top: int = 1, adapter: str = "") -> Request:
    """Returns the request whose completion `score_of` turns into the score of the continuation.

    Args:
        prompt: the tokens of the prompt, at least one.
        continuation: the tokens of the continuation, at least one.
        top: the number of alternatives at each place; at least one is computed.
        adapter: the name of an adapter; "" = none.
    """
    tokens = (*prompt, *continuation)
    params = SamplingParams(
        temperature=0,
        logit_bias={tokens[-1]: _FORCED},
        max_new_tokens=1,
        logprobs=max(1, top),
        prompt_logprobs=max(1, top) if len(continuation) > 1 else None,
    )
    return Request(tokens[:-1], params, uuid.uuid4().hex, logprobs_from=len(prompt), adapter=adapter)


def score_requests(
    tokenizer: Encoder | None, pairs: Iterable[tuple[GivenPrompt, GivenPrompt]], adapter: str = ""
) -> list[Request]:
    """Returns the request of each pair of a prompt and its continuation; see `split_tokens`."""
    sides = (split_tokens(tokenizer, as_prompt(prompt), as_prompt(after)) for prompt, after in pairs)
    return [score_request(*each, adapter=adapter) for each in sides]


def score_of(completion: Completion) -> Score:
    """Returns the score from the completion of `score_request`, whose prompt has all tokens but the last."""
    places = score_places(completion)
    return score_of_places(places, completion.usage.prompt_tokens + 1 - len(places))


def score_of_places(places: Sequence[TokenLogprob], prompt_tokens: int) -> Score:
    """Returns the score from the continuation's tokens, each with an alternative at least."""
    return Score(
        token_ids=tuple(place.token_id for place in places),
        logprobs=tuple(_known(place) for place in places),
        greedy_token_ids=tuple(place.top[0].token_id for place in places),
        prompt_tokens=prompt_tokens,
    )


def score_places(completion: Completion) -> tuple[TokenLogprob, ...]:
    """Returns the tokens of the continuation, with alternatives, from the completion of `score_request`."""
    return (*completion.prompt_logprobs, *completion.logprobs)


def _known(place: TokenLogprob) -> float:
    assert place.logprob is not None, "only the first token of a prompt has none"
    return place.logprob
