"""OpenAI's two dialects: the bodies of both completions as requests to the engine, and its events as choices."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....core.argument_types import NUMBER
from ....core.errors import InvalidRequest
from ...engine.request.completion import Choice
from ...engine.request.events import FinishReason, TokenLogprob
from ...engine.request.prompts import Conversation, GivenPrompt
from ...engine.request.request import Request
from ...engine.request.sampling_params import OPTIONS, SamplingParams
from ..http.json_body import Fields, is_id_list

# A call's prompts and the samples of all of them; each is a request, or a sample, of its own in the engine.
MAX_PROMPTS: Final = 16
MAX_CHOICES: Final = 32
# Numbers have SamplingParams' names. Some of them, and below top_k, min_tokens, stop_token_ids and ignore_eos, are not
# OpenAI's: other servers have them under these names too.
_NUMBERS: Final = tuple(name for name, each in OPTIONS.items() if each.kind is NUMBER)
_NOT_BUILT: Final = frozenset(
    (
        *("audio", "best_of", "echo", "function_call", "functions", "metadata", "modalities", "moderation"),
        *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort"),
        *("safety_identifier", "service_tier", "store", "suffix", "tool_choice", "tools", "verbosity"),
        "web_search_options",
    )
)
_NOT_BUILT_IN_MESSAGES: Final = frozenset(("audio", "function_call", "name", "refusal", "tool_call_id", "tool_calls"))


@dataclass(frozen=True)
class CompletionCall:
    """A call as read.

    Attributes:
        requests: one for each prompt.
        params: the sampling options of all.
        is_streamed: whether the answer comes in server-sent events.
        has_usage: whether the last of these events has the numbers of tokens.
    """

    requests: tuple[Request, ...]
    params: SamplingParams
    is_streamed: bool
    has_usage: bool


class TextDialect:
    """The form of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def take_prompts(self, fields: Fields) -> Sequence[GivenPrompt]:
        """Takes the prompts, each a text or a list of token ids."""
        value = fields.anything("prompt")
        if isinstance(value, str) or (value and is_id_list(value)):
            value = [value]
        right = f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these"
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
            raise fields.wrong("prompt", value if not isinstance(value, list) else f"a list of {len(value)}", right)
        if not all(is_id_list(prompt) or isinstance(prompt, str) for prompt in value):
            raise fields.wrong("prompt", value[:4], right)
        return [fields.as_text(one, "prompt") if isinstance(one, str) else one for one in value]

    def take_logprobs(self, fields: Fields, num_samples: int) -> int | None:
        """Takes the number of alternatives to each token; None = log-probabilities are not wanted."""
        top = fields.integer("logprobs")
        fields.only("best_of", num_samples)
        fields.only("echo", False)
        return top

    def whole(self, choice: Choice, index: int, has_logprobs: bool) -> dict[str, Any]:
        """Returns a complete choice."""
        logprobs = self.logprobs(choice.logprobs) if has_logprobs else None
        return self.chunk(index, choice.text, logprobs, reason_of(choice.finish_reason))

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the first chunk of a choice, if there is one before its text."""
        return None

    def chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """Returns a chunk of a choice: some text, or its end."""
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns log-probabilities of tokens."""
        names = [_names(entry) for entry in entries]
        return {
            "tokens": [known[entry.token_id] for entry, known in zip(entries, names, strict=True)],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {known[top.token_id]: top.logprob for top in entry.top}
                for entry, known in zip(entries, names, strict=True)
            ],
            "text_offset": [entry.text_offset for entry in entries],
        }


class ChatDialect:
    """The form of /v1/chat/completions; its methods are those of TextDialect."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def take_prompts(self, fields: Fields) -> Sequence[GivenPrompt]:
        messages = list[dict[str, str]]()
        for message in fields.objects("messages"):
            role, content = message.text("role"), _content(message)
            if role is None:
                raise message.wrong("role", None, "system, user or assistant")
            messages.append({"role": role, "content": content})
            message.refuse_rest(_NOT_BUILT_IN_MESSAGES)
        return [Conversation(messages)]

    def take_logprobs(self, fields: Fields, num_samples: int) -> int | None:
        has_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs")
        if top and not has_logprobs:
            raise fields.wrong("top_logprobs", top, "unset where logprobs is not true")
        return top or 0 if has_logprobs else None

    def whole(self, choice: Choice, index: int, has_logprobs: bool) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.logprobs(choice.logprobs) if has_logprobs else None,
            "finish_reason": reason_of(choice.finish_reason),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {
                **_token(entry.token, entry.logprob),
                "top_logprobs": [_token(top.token, top.logprob) for top in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}


Dialect = TextDialect | ChatDialect


def read_call(dialect: Dialect, body: Mapping[str, Any], request_id: str) -> CompletionCall:
    """Reads the body of a call.

    Args:
        dialect: its form.
        body: the object.
        request_id: the name of the call.

    Raises:
        InvalidRequest: a field is wrong, unknown, or not built.
    """
    fields = Fields(body)
    prompts, model, options = dialect.take_prompts(fields), fields.text("model") or "", _options(fields)
    samples = options.get("n", 1)
    options["logprobs"] = dialect.take_logprobs(fields, samples or 1)
    if samples * len(prompts) > MAX_CHOICES:
        raise fields.wrong("n", samples, f"at most {MAX_CHOICES} with all prompts' samples together")
    is_streamed, stream_options = fields.flag("stream"), fields.object("stream_options")
    has_usage = stream_options is not None and stream_options.flag("include_usage")
    if stream_options is not None:
        if not is_streamed:
            raise InvalidRequest("stream_options is set, and stream is not; unset one.", field="stream_options")
        stream_options.only("include_obfuscation", False)
        stream_options.refuse_rest()
    fields.refuse_rest(_NOT_BUILT)
    params = SamplingParams(**options)
    names = [request_id] if len(prompts) == 1 else [f"{request_id}-{number}" for number in range(len(prompts))]
    requests = tuple(
        Request(prompt, params, name, model, at_once=not is_streamed)
        for name, prompt in zip(names, prompts, strict=True)
    )
    return CompletionCall(requests, params, is_streamed, has_usage)


def reason_of(reason: FinishReason) -> str:
    """Returns OpenAI's name of a reason to finish."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def _content(message: Fields) -> str:
    """Takes the content of a message: a text, or parts of text."""
    value = message.anything("content")
    if value is None:
        raise message.wrong("content", None, "a string or a list of parts")
    if not isinstance(value, list):
        return message.as_text(value, "content")
    texts = []
    for part in Fields({"content": value}, message.path).objects("content"):
        kind = part.text("type")
        if kind != "text":
            raise part.wrong("type", kind, "text, the only kind of part that is built")
        texts.append(part.text("text") or "")
        part.refuse_rest()
    return "".join(texts)


def _options(fields: Fields) -> dict[str, Any]:
    """Takes the options that both dialects share; returns those that are set, as arguments of SamplingParams."""
    found: dict[str, Any] = {
        **{name: fields.number(name) for name in _NUMBERS},
        "top_k": fields.integer("top_k"),
        "seed": fields.integer("seed", 2**64 - 1),
        "n": fields.integer("n"),
        "json_schema": _schema(fields.object("response_format")),
        "max_new_tokens": _length(fields),
        "min_new_tokens": fields.integer("min_tokens"),
        "logit_bias": fields.numbers_by_id("logit_bias"),
        "stop": tuple(fields.texts("stop")),
        "stop_token_ids": tuple(fields.integers("stop_token_ids")),
        "ignore_eos": fields.flag("ignore_eos"),
    }
    fields.text("user")  # a name for the operator's own records: it changes nothing
    return {name: value for name, value in found.items() if value is not None}


def _length(fields: Fields) -> int | None:
    """Takes the number of new tokens, which has an old name and a new one."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise fields.wrong("max_completion_tokens", new, f"{old}, as max_tokens is; set one of them")
    return new if old is None else old


def _schema(form: Fields | None) -> str | None:
    """Returns the JSON Schema of a response format; None for plain text."""
    if form is None:
        return None
    kind, schema = form.text("type"), None
    if kind == "json_schema":
        schema = _named_schema(form)
    elif kind == "json_object":
        schema = '{"type":"object"}'
    elif kind != "text":
        raise form.wrong("type", kind, "text, json_object or json_schema")
    form.refuse_rest()
    return schema


def _named_schema(form: Fields) -> str:
    named = form.object("json_schema")
    if named is None:
        raise form.wrong("json_schema", None, "an object with a name and a schema")
    for name in ("name", "description"):
        named.text(name)
    named.flag("strict")  # the text is always what the schema accepts
    schema = named.anything("schema")
    if not isinstance(schema, dict):
        raise named.wrong("schema", schema, "a JSON Schema, as an object")
    named.refuse_rest()
    return json.dumps(schema)


def _token(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _name(token), "logprob": logprob, "bytes": list(token)}


def _names(entry: TokenLogprob) -> dict[int, str]:
    """Returns the names of the tokens of an entry by their ids: no two have one name, even if their bytes are equal."""
    found = dict[int, str]()
    for token_id, token in ((top.token_id, top.token) for top in entry.top):
        found[token_id] = _free_name(token_id, token, found)
    if entry.token_id not in found:
        found[entry.token_id] = _free_name(entry.token_id, entry.token, found)
    return found


def _free_name(token_id: int, token: bytes, named: Mapping[int, str]) -> str:
    names = (_name(token), _bytes_name(token), f"token_id:{token_id}")
    return next((name for name in names if name not in named.values()), f"token_id:{token_id} of the vocabulary")


def _name(token: bytes) -> str:
    """Returns the text of a token; of one that is no whole characters, OpenAI's name for its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return _bytes_name(token)


def _bytes_name(token: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
