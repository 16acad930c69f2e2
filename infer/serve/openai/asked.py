"""The bodies of both completions, as requests to the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....core.errors import InvalidRequest
from ...engine.request.prompts import Conversation, GivenPrompt
from ...engine.request.request import Request
from ...engine.request.sampling_params import SamplingParams
from .fields import Fields, is_id_list
from .sampling_fields import NOT_BUILT, read_options

# A call's prompts and the samples of all of them; each is a request, or a sequence, of its own in the engine.
MAX_PROMPTS: Final = 16
MAX_CHOICES: Final = 32


@dataclass(frozen=True)
class AskedCompletion:
    """A call as read.

    Attributes:
        requests: one for each prompt.
        samples: the number of samples of each prompt.
        is_streamed: whether the answer comes in server-sent events.
        has_usage: whether the last of these events has the numbers of tokens.
        has_logprobs: whether tokens come with their log-probabilities.
    """

    requests: tuple[Request, ...]
    samples: int
    is_streamed: bool
    has_usage: bool
    has_logprobs: bool


Read = Callable[[dict[str, Any], str], AskedCompletion]


def read_completion(body: dict[str, Any], request_id: str) -> AskedCompletion:
    """Reads the body of /v1/completions.

    Args:
        body: the object.
        request_id: the caller's name for the call; "" = the server makes one.

    Raises:
        InvalidRequest: a field is wrong, unknown, or not built.
    """
    fields = Fields(body)
    prompts, model, options = _prompts(fields), fields.text("model") or "", read_options(fields)
    if (top := fields.integer("logprobs")) is not None:
        options["logprobs"] = top
    fields.only("best_of", options.get("n") or 1)
    fields.only("echo", False)
    names = [f"{request_id}-{number}" if request_id else "" for number in range(len(prompts))]
    named = list(zip([request_id] if len(prompts) == 1 else names, prompts, strict=True))
    return _asked(fields, named, model, options)


def read_chat(body: dict[str, Any], request_id: str) -> AskedCompletion:
    """Reads the body of /v1/chat/completions; see `read_completion`."""
    fields, messages = Fields(body), list[dict[str, str]]()
    for message in fields.objects("messages"):
        role, content = message.text("role"), _content(message)
        if role is None:
            raise message.wrong("role", None, "system, user or assistant")
        messages.append({"role": role, "content": content})
        message.refuse_rest(frozenset(("audio", "function_call", "name", "refusal", "tool_call_id", "tool_calls")))
    model, options = fields.text("model") or "", read_options(fields)
    has_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs")
    if has_logprobs:
        options["logprobs"] = top or 0
    elif top:
        raise fields.wrong("top_logprobs", top, "unset where logprobs is not true")
    return _asked(fields, [(request_id, Conversation(messages))], model, options)


def _asked(
    fields: Fields, prompts: Sequence[tuple[str, GivenPrompt]], model: str, options: dict[str, Any]
) -> AskedCompletion:
    """Takes what is left of a body; each prompt has the name of its request."""
    samples = options.get("n", 1)
    if samples * len(prompts) > MAX_CHOICES:
        raise fields.wrong("n", samples, f"at most {MAX_CHOICES} with all prompts' samples together")
    is_streamed, stream_options = fields.flag("stream"), fields.object("stream_options")
    has_usage = stream_options is not None and stream_options.flag("include_usage")
    if stream_options is not None:
        if not is_streamed:
            raise InvalidRequest("stream_options is set, and stream is not; unset one.", field="stream_options")
        stream_options.only("include_obfuscation", False)
        stream_options.refuse_rest()
    fields.refuse_rest(NOT_BUILT)
    params = SamplingParams(**options)
    requests = tuple(
        Request(prompt, params, model=model, request_id=name, at_once=not is_streamed) for name, prompt in prompts
    )
    return AskedCompletion(requests, samples, is_streamed, has_usage, params.logprobs is not None)


def _prompts(fields: Fields) -> list[Any]:
    """Takes the prompts, each a text or a list of token ids."""
    value = fields.anything("prompt")
    if isinstance(value, str) or (value and is_id_list(value)):
        value = [value]
    right = f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these"
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
        raise fields.wrong("prompt", value if not isinstance(value, list) else f"a list of {len(value)}", right)
    for prompt in value:
        if not is_id_list(prompt) and not isinstance(prompt, str):
            raise fields.wrong("prompt", value[:4], right)
    return [Fields({"prompt": one}).text("prompt") if isinstance(one, str) else one for one in value]


def _content(message: Fields) -> str:
    """Takes the content of a message: a text, or parts of text."""
    value = message.anything("content")
    if not isinstance(value, list):
        text = Fields({"content": value}, message.path).text("content")
        if text is None:
            raise message.wrong("content", None, "a string or a list of parts")
        return text
    texts = []
    for part in Fields({"content": value}, message.path).objects("content"):
        kind = part.text("type")
        if kind != "text":
            raise part.wrong("type", kind, "text, the only kind of part that is built")
        texts.append(part.text("text") or "")
        part.refuse_rest()
    return "".join(texts)
