"""The checks of a request before its prompt is converted and the engine receives it."""

from typing import Final

from ....core.errors import InvalidRequest, PromptTooLong
from ...engine.request.events import ModelInfo
from ...engine.request.request import Request
from ...engine.request.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from ..access.tokens import ADMIN, Caller
from ..errors import RoleMissing, UnknownModel

MAX_SALT: Final = 1024


def check_request(asked: Request, info: ModelInfo, caller: Caller) -> None:
    """Checks a request's counts, model and priority.

    Raises:
        InvalidRequest: a list or text is too long.
        UnknownModel: the request is for another model.
        RoleMissing: the priority needs another role.
    """
    params = asked.params
    check_counts(len(params.logit_bias), len(params.stop), len(params.stop_token_ids), asked.cache.salt)
    check_model(asked.model, info)
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
        known = " or ".join(map(repr, info.names))
        raise UnknownModel(f"Model {name[:100]!r} is not served here; leave it empty or ask for {known}.")


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
