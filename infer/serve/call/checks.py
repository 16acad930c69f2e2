"""The checks of a request before the engine receives it, among them the largest message that its answer could need.

gRPC would refuse a larger one only after all of the work was done.
"""

from collections.abc import Iterable
from typing import Final

from ....core.errors import InvalidRequest, PromptTooLong, UnknownAdapter
from ...engine.request.events import PROMPT_LOGPROBS_PER_EVENT, ModelInfo
from ...engine.request.request import Request
from ...engine.request.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from ...engine.request.streams import MAX_TOKENS_PER_DELTA
from ..access.tokens import ADMIN, Caller
from ..errors import RoleMissing, UnknownModel

MAX_SALT: Final = 1024


def check_request(asked: Request, info: ModelInfo, caller: Caller) -> None:
    """Checks a request's counts, model, adapter and priority.

    Raises:
        InvalidRequest: a list or text is too long.
        UnknownModel: the request is for another model.
        RoleMissing: the priority needs another role, or the caller may not use the adapter.
    """
    params = asked.params
    check_counts(len(params.logit_bias), len(params.stop), len(params.stop_token_ids), asked.cache.salt)
    check_model(asked.model, info)
    if not caller.may_use(asked.adapter):
        raise RoleMissing(f"The token of {caller.principal!r} does not allow the adapter {asked.adapter[:100]!r}.")
    if asked.priority > 0 and ADMIN not in caller.roles:
        raise RoleMissing(f"priority is {asked.priority}; above 0 it needs the role admin. Use 0 or less.")


def check_counts(num_biases: int, num_stops: int, num_stop_ids: int, salt: str) -> None:
    """Checks the counts of a request's options, which a protocol can do before it converts them.

    Raises:
        InvalidRequest: a list or the salt is too long.
    """
    for field, count, most in (
        ("logit_bias", num_biases, MAX_LOGIT_BIAS),
        ("stop", num_stops, MAX_STOP_STRINGS),
        ("stop_token_ids", num_stop_ids, MAX_STOP_TOKEN_IDS),
    ):
        if count > most:
            raise InvalidRequest(f"{field} has {count} entries; it must have at most {most}.", field=field)
    if len(salt) > MAX_SALT:
        raise InvalidRequest(f"cache.salt has {len(salt)} characters; it must have at most {MAX_SALT}.", "cache.salt")


def check_model(name: str, info: ModelInfo) -> None:
    """Checks that the served model has a name, or that there is none; raises UnknownModel otherwise."""
    if name and name not in info.names:
        raise unknown_model(name, info.names)


def unknown_model(name: str, known: Iterable[str]) -> UnknownModel:
    """Returns the error of a request for a model that is not served.

    Args:
        name: the name in the request.
        known: the names that the caller may ask for, which the error has.
    """
    names = " or ".join(map(repr, known))
    return UnknownModel(f"Model {name[:100]!r} is not served here; leave it empty or ask for {names}.")


def unknown_adapter(name: str, known: Iterable[str]) -> UnknownAdapter:
    """Returns the error of a request for an adapter that is not loaded.

    Args:
        name: the name in the request.
        known: the loaded ones that the caller may use, which the error names.
    """
    names = ", ".join(map(repr, known)) or "none"
    return UnknownAdapter(f"Adapter {name[:100]!r} is not loaded; loaded are: {names}. Load it first, or name another.")


def check_top(top: int) -> None:
    """Checks the number of alternatives that a score reports; raises InvalidRequest if it is wrong."""
    if top > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top is {top}; it must be 0 to {MAX_TOP_LOGPROBS}.", field="top")


def check_text(text: str, longest_token_bytes: int, info: ModelInfo, field: str) -> None:
    """Checks that a text may have few enough tokens, before the effort of finding them.

    Args:
        info: the description of the model.
        field: the text's field in the request.

    Raises:
        PromptTooLong: the text has more tokens than the model's length, however it is tokenized.
    """
    size, longest = len(text.encode()), info.max_model_len * longest_token_bytes
    if size > longest:
        raise PromptTooLong(
            f"The text has {size} bytes, more than {info.max_model_len} tokens of at most {longest_token_bytes} bytes "
            f"can hold. Shorten it to at most {longest} bytes.",
            field=field,
        )


MAX_RESPONSE_BYTES: Final = 16 << 20
# The most bytes of numbers, tags and lengths, without those of text.
_TOKEN_BYTES: Final = 5  # a token id in a packed list
_ENTRY_BYTES: Final = 32  # a TokenLogprob
_ALTERNATIVE_BYTES: Final = 20  # a TopLogprob
# The text of a token has its bytes, but U+FFFD, of 3 bytes, stands for one that is no UTF-8; such tokens are short.
_LEAST_TEXT_BYTES: Final = 24
_FRAME_BYTES: Final = 4096  # the rest of a message: ids, usage, times
_SAMPLE_BYTES: Final = 512  # the rest of a sample: numbers, the stop string that ended it


def check_response_size(
    params: SamplingParams, num_prompt: int, max_model_len: int, longest_token_bytes: int, at_once: bool
) -> None:
    """Checks that no message of an answer could be larger than the limit.

    Args:
        params: the sampling options.
        num_prompt: the number of tokens of the prompt.
        max_model_len: the largest number of tokens of a sequence.
        longest_token_bytes: the bytes of the longest token; 0 if there is no text.
        at_once: whether the answer is one message; else some tokens of the prompt, or some new ones, have one.

    Raises:
        InvalidRequest: one could be; the message says which field to lower.
    """
    room = max(1, max_model_len - num_prompt)
    num_new = room if params.max_new_tokens is None else params.max_new_tokens
    per_new = _TOKEN_BYTES + _text_bytes(longest_token_bytes) + _entry_bytes(params.logprobs, longest_token_bytes)
    num_scored = num_prompt if at_once else min(num_prompt, PROMPT_LOGPROBS_PER_EVENT)
    prompt = num_scored * _entry_bytes(params.prompt_logprobs, longest_token_bytes)
    answer = (params.n * num_new if at_once else min(num_new, MAX_TOKENS_PER_DELTA)) * per_new
    frame = _FRAME_BYTES + params.n * _SAMPLE_BYTES
    if prompt + frame > MAX_RESPONSE_BYTES:
        raise _too_large(prompt, "prompt_logprobs", "lower it, or shorten the prompt")
    if answer + (prompt if at_once else 0) + frame > MAX_RESPONSE_BYTES:
        how = "lower it, n or output.logprobs" + (", or ask for a stream" if at_once else "")
        raise _too_large(answer, "max_new_tokens", how)


def check_score_size(num_tokens: int, num_top: int, longest_token_bytes: int) -> None:
    """Checks that the score of a continuation of `num_tokens` cannot be larger than the limit of a message.

    Raises:
        InvalidRequest: it could be.
    """
    size = num_tokens * _entry_bytes(max(1, num_top), longest_token_bytes)
    rest = _FRAME_BYTES + _SAMPLE_BYTES + _TOKEN_BYTES + _text_bytes(longest_token_bytes)
    if size + rest > MAX_RESPONSE_BYTES:
        raise _too_large(size, "top", "lower it, or shorten the continuation")


def check_text_size(num_tokens: int, longest_token_bytes: int) -> None:
    """Checks that the text of so many token ids cannot be larger than the limit of a message.

    Raises:
        InvalidRequest: it could be.
    """
    most = (MAX_RESPONSE_BYTES - _FRAME_BYTES) // _text_bytes(longest_token_bytes)
    if num_tokens > most:
        raise _too_large(num_tokens * _text_bytes(longest_token_bytes), "ids", f"send at most {most} in one request")


def _text_bytes(longest: int) -> int:
    return max(longest, _LEAST_TEXT_BYTES) if longest else 0


def _entry_bytes(num_top: int | None, longest: int) -> int:
    return 0 if num_top is None else _ENTRY_BYTES + longest + num_top * (_ALTERNATIVE_BYTES + longest)


def _too_large(size: int, field: str, how: str) -> InvalidRequest:
    return InvalidRequest(
        f"The answer could have {size} bytes, and a message has at most {MAX_RESPONSE_BYTES}. The field is {field}: "
        f"{how}.",
        field=field,
    )
