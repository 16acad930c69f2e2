"""The requests in messages of tk.v1, as those that the runner takes."""

from collections.abc import Sequence

from ....core.errors import InvalidRequest
from ....proto.v1 import generation_pb2 as pb
from ...client.wire import cache_from_request, params_from_request
from ...engine.request.prompts import Conversation, GivenPrompt
from ...engine.request.request import Request
from ..call.requests import check_counts


def asked_request(message: pb.GenerateRequest, prompt: GivenPrompt) -> Request:
    """Returns the request of a message, without a deadline.

    Args:
        message: the message, of which all but the prompt is read.

    Raises:
        InvalidRequest: a list or text is too long.
    """
    stopping, cache = message.stopping, cache_from_request(message)
    check_counts(len(message.sampling.logit_bias), len(stopping.stop), len(stopping.stop_token_ids), cache.salt)
    return Request(
        prompt,
        params_from_request(message),
        model=message.model,
        request_id=message.request_id,
        special_tokens=not message.no_special_tokens,
        priority=message.priority,
        cache=cache,
    )


def prompt_of(message: pb.GenerateRequest) -> GivenPrompt:
    """Returns the prompt of a request; long lists of token ids are not copied.

    Raises:
        InvalidRequest: there is none, or a wrong conversation.
    """
    match message.WhichOneof("prompt"):
        case "text":
            text: str = message.text
            return text
        case "tokens":
            ids: Sequence[int] = message.tokens.ids
            return ids
        case "chat":
            return Conversation([{"role": each.role, "content": each.content} for each in message.chat.messages])
    raise InvalidRequest("The request has no prompt; set text, tokens or chat.", field="prompt")


def score_sides(message: pb.ScoreRequest) -> tuple[str | Sequence[int], str | Sequence[int]]:
    """Returns the prompt and the continuation of a request for a score.

    Raises:
        InvalidRequest: one of them is missing.
    """
    return _side(message, "prompt"), _side(message, "continuation")


def _side(message: pb.ScoreRequest, side: str) -> str | Sequence[int]:
    arm = message.WhichOneof(side)
    if arm is None:
        raise InvalidRequest(f"The request has no {side}; set text or tokens.", field=side)
    value = getattr(message, arm)
    given: str | Sequence[int] = value if isinstance(value, str) else value.ids
    return given
