"""The bodies of both completions, as requests to the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ...core.errors import InvalidRequest
from ...proto.v1 import generation_pb2 as pb
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

    requests: tuple[pb.GenerateRequest, ...]
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
    fields, request = Fields(body), pb.GenerateRequest(request_id=request_id)
    prompts = _prompts(fields)
    read_options(fields, request)
    if (top := fields.integer("logprobs")) is not None:
        request.output.logprobs = top
    fields.only("best_of", request.sampling.n or 1)
    fields.only("echo", False)
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(pb.GenerateRequest())
        requests[-1].CopyFrom(request)
        if request_id and len(prompts) > 1:
            requests[-1].request_id = f"{request_id}-{number}"
        if isinstance(prompt, str):
            requests[-1].text = prompt
        else:
            requests[-1].tokens.ids.extend(prompt)
    return _asked(fields, requests)


def read_chat(body: dict[str, Any], request_id: str) -> AskedCompletion:
    """Reads the body of /v1/chat/completions; see `read_completion`."""
    fields, request = Fields(body), pb.GenerateRequest(request_id=request_id)
    request.chat.SetInParent()
    for message in fields.objects("messages"):
        role, content = message.text("role"), _content(message)
        if role is None:
            raise message.wrong("role", None, "system, user or assistant")
        request.chat.messages.add(role=role, content=content)
        message.refuse_rest(frozenset(("audio", "function_call", "name", "refusal", "tool_call_id", "tool_calls")))
    read_options(fields, request)
    has_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs")
    if has_logprobs:
        request.output.logprobs = top or 0
    elif top:
        raise fields.wrong("top_logprobs", top, "unset where logprobs is not true")
    return _asked(fields, [request])


def _asked(fields: Fields, requests: list[pb.GenerateRequest]) -> AskedCompletion:
    sampling = requests[0].sampling
    samples = sampling.n if sampling.HasField("n") else 1
    if samples * len(requests) > MAX_CHOICES:
        raise fields.wrong("n", samples, f"at most {MAX_CHOICES} with all prompts' samples together")
    is_streamed, options = fields.flag("stream"), fields.object("stream_options")
    has_usage = options is not None and options.flag("include_usage")
    if options is not None:
        if not is_streamed:
            raise InvalidRequest("stream_options is set, and stream is not; unset one.", field="stream_options")
        options.only("include_obfuscation", False)
        options.refuse_rest()
    fields.refuse_rest(NOT_BUILT)
    has_logprobs = requests[0].output.HasField("logprobs")
    return AskedCompletion(tuple(requests), samples, is_streamed, has_usage, has_logprobs)


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
