"""The messages of a client's requests, checked before they are sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ...core.errors import InvalidRequest
from ...proto.v1 import generation_pb2 as pb
from ..engine.request.prompts import Conversation, GivenPrompt, GivenPrompts, Prompt, as_prompt, as_prompts
from ..engine.request.request import Request
from .chat_wire import chat_to_wire
from .wire import cache_to_request, params_to_request

_ANY_VOCABULARY: Final = 1 << 32


def message_for(request: Request) -> pb.GenerateRequest:
    """Returns the message for a request of `as_request`; the server chooses the id.

    Raises:
        InvalidRequest: a value that no server accepts, whatever the size of its vocabulary.
    """
    request.params.validate(_ANY_VOCABULARY)
    message, prompt = pb.GenerateRequest(), request.prompt
    with sendable():
        params_to_request(request.params, message)
        cache_to_request(request.cache, message)
        message.adapter = request.adapter
        if isinstance(prompt, str):
            message.text = prompt
        elif isinstance(prompt, Conversation):
            message.chat.CopyFrom(chat_to_wire(prompt))
        else:
            message.tokens.ids.extend(prompt)
            message.tokens.SetInParent()
    return message


def score_messages(prompt: GivenPrompt, continuation: GivenPrompts, adapter: str = "") -> list[pb.ScoreRequest]:
    """Returns one message per continuation; the arguments are those of `Client.score`.

    Raises:
        InvalidRequest: prompt or continuation are neither text nor token ids, or cannot be sent.
    """
    return [_score_message(as_prompt(prompt), one, adapter) for one in as_prompts(continuation)]


def _score_message(prompt: Prompt, continuation: Prompt, adapter: str) -> pb.ScoreRequest:
    request = pb.ScoreRequest(top=1)
    with sendable():
        request.adapter = adapter
    for side, given, prefix in (("prompt", prompt, ""), ("continuation", continuation, "continuation_")):
        if isinstance(given, Conversation):
            raise InvalidRequest(f"The {side} of a score is a Conversation; it must be text or token ids.", field=side)
        with sendable():
            if isinstance(given, str):
                setattr(request, f"{prefix}text", given)
            else:
                tokens = getattr(request, f"{prefix}tokens")
                tokens.ids.extend(given)
                tokens.SetInParent()
    return request


def tokenize_message(text: str, special_tokens: bool) -> pb.TokenizeRequest:
    """Returns the message that asks for the tokens of a text; raises InvalidRequest if the text cannot be sent."""
    with sendable():
        return pb.TokenizeRequest(text=text, no_special_tokens=not special_tokens)


def detokenize_message(token_ids: Sequence[int]) -> pb.TokenIds:
    """Returns the message that asks for the text of tokens; raises InvalidRequest if an id cannot be sent."""
    with sendable():
        return pb.TokenIds(ids=token_ids)


@contextmanager
def sendable() -> Iterator[None]:
    """Turns the error for a value that the wire's types cannot hold (a negative id) into InvalidRequest."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"A value cannot be sent: {error}") from error
