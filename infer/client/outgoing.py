"""The messages of a client's requests, checked before they are sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ...core.errors import InvalidRequest
from ...proto.v1 import generation_pb2 as pb
from ..engine.request.events import CacheOptions
from ..engine.request.prompts import (
    Conversation,
    GivenPrompt,
    GivenPrompts,
    Prompt,
    as_params,
    as_prompt,
    as_prompts,
    check_options,
)
from ..engine.request.sampling_params import SamplingParams
from .wire import cache_to_request, params_to_request

_ANY_VOCABULARY: Final = 1 << 32


def messages_for(
    prompts: GivenPrompts,
    params: SamplingParams | Sequence[SamplingParams] | None,
    cache: CacheOptions | None,
) -> list[pb.GenerateRequest]:
    """Returns one message per prompt; the arguments are those of `Client.generate`.

    Raises:
        InvalidRequest: see `message_for`.
    """
    given = as_prompts(prompts)
    chosen = as_params(params, len(given))
    return [message_for(prompt, one, cache) for prompt, one in zip(given, chosen, strict=True)]


def message_for(prompt: Prompt, params: SamplingParams, cache: CacheOptions | None) -> pb.GenerateRequest:
    """Returns the message for a prompt.

    Raises:
        InvalidRequest: a value that no server accepts, whatever the size of its vocabulary.
    """
    check_options(params, cache)
    params.validate(_ANY_VOCABULARY)
    request = pb.GenerateRequest()
    with sendable():
        params_to_request(params, request)
        cache_to_request(cache or CacheOptions(), request)
        if isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, Conversation):
            request.chat.messages.extend(pb.ChatMessage(**message) for message in prompt.messages)
        else:
            request.tokens.ids.extend(prompt)
            request.tokens.SetInParent()
    return request


def score_messages(prompt: GivenPrompt, continuation: GivenPrompts) -> list[pb.ScoreRequest]:
    """Returns one message per continuation; the arguments are those of `Client.score`.

    Raises:
        InvalidRequest: prompt or continuation are neither text nor token ids, or cannot be sent.
    """
    return [_score_message(as_prompt(prompt), one) for one in as_prompts(continuation)]


def _score_message(prompt: Prompt, continuation: Prompt) -> pb.ScoreRequest:
    request = pb.ScoreRequest(top=1)
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
