"""The checks of a request against the served model, before the engine queues it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from ....core.errors import InvalidRequest
from ..grammar.compiler import Grammars
from .events import ModelInfo
from .prompts import check_length
from .request import Request

_MAX_TOP_K: Final = 2**31 - 1  # the plan's width; no vocabulary is larger


def check_servable(request: Request, info: ModelInfo, has_tokenizer: bool) -> None:
    """Checks a request's options and tokens; the length comes before all work that grows with it.

    Args:
        request: the request.
        info: the description of the model.
        has_tokenizer: whether the checkpoint has a tokenizer.

    Raises:
        InvalidRequest: a value cannot be served.
        PromptTooLong: the prompt leaves no room for a new token.
    """
    params, vocab_size = request.params, info.vocab_size
    params.validate(vocab_size)
    if params.top_k > _MAX_TOP_K:
        raise InvalidRequest(f"top_k is {params.top_k}; it must be at most {_MAX_TOP_K}.", "top_k")
    check_length(len(request.token_ids), info.max_model_len)
    if not request.is_checked:
        checked_prompt(request.token_ids, vocab_size)
    if params.stop and not has_tokenizer:
        raise InvalidRequest(
            "Stop strings need text, and the checkpoint has no tokenizer.json; use stop_token_ids.",
            field="stop",
        )


def checked_prompt(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the token ids of a prompt; a million takes a twentieth of a second, too long for an event loop.

    Raises:
        InvalidRequest: one is not in the vocabulary.
    """
    prompt = tuple(ids)
    if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidRequest(f"Token id {wrong} is not one of the vocabulary's, 0 to {vocab_size - 1}.", field="prompt")
    return prompt


def with_grammar(request: Request, grammars: Grammars) -> Request:
    """Returns a request with the grammar of its constraint, if it has one; not for an event loop (see `compile`).

    Raises:
        InvalidRequest: see `Grammars.compile`.
    """
    constraint = request.params.constraint
    if constraint is None or request.grammar is not None:
        return request
    keep = request.params.keep_special_tokens
    return replace(request, grammar=grammars.compile(constraint, request.principal, request.token_ids, keep))
