"""OpenAI's two dialects: the bodies of both completions as requests to the engine, and its events as choices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....core.errors import InvalidRequest
from ...engine.request.completion import Choice
from ...engine.request.events import FinishReason, TokenLogprob
from ...engine.request.prompts import GivenPrompt
from ...engine.request.request import Request
from ...engine.request.sampling_params import SamplingParams
from ..http.json_body import Fields, is_id_list
from .call_options import NOT_BUILT, take_cache_options, take_options
from .chat_messages import take_messages

# A call's prompts and the samples of all of them; each is a request, or a sample, of its own in the engine.
MAX_PROMPTS: Final = 128
MAX_CHOICES: Final = 128


@dataclass(frozen=True)
class CompletionCall:
    """A call as read.

    Attributes:
        requests: one for each prompt.
        params: the sampling options of all.
        is_streamed: whether the answer comes in server-sent events.
        has_usage: whether the last of these events has the numbers of tokens.
        has_echo: whether the text of a choice begins with its prompt.
        is_prompt_only: whether it has nothing but the prompt; the engine computes a token, which is left out.
    """

    requests: tuple[Request, ...]
    params: SamplingParams
    is_streamed: bool
    has_usage: bool
    has_echo: bool = False
    is_prompt_only: bool = False


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
        return top

    def take_echo(self, fields: Fields) -> bool:
        """Takes whether the text of a choice begins with its prompt."""
        return fields.flag("echo")

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
                None if entry.logprob is None else {known[top.token_id]: top.logprob for top in entry.top}
                for entry, known in zip(entries, names, strict=True)
            ],
            "text_offset": [entry.text_offset for entry in entries],
        }


class ChatDialect:
    """The form of /v1/chat/completions; its methods are those of TextDialect."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def take_prompts(self, fields: Fields) -> Sequence[GivenPrompt]:
        return [take_messages(fields)]

    def take_logprobs(self, fields: Fields, num_samples: int) -> int | None:
        has_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs")
        if top and not has_logprobs:
            raise fields.wrong("top_logprobs", top, "unset where logprobs is not true")
        return top or 0 if has_logprobs else None

    def take_echo(self, fields: Fields) -> bool:
        return False  # a chat has none

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
    prompts, model, options = dialect.take_prompts(fields), fields.text("model") or "", take_options(fields)
    samples = options.get("n", 1)
    options["logprobs"] = dialect.take_logprobs(fields, samples or 1)
    has_echo, cache = dialect.take_echo(fields), take_cache_options(fields)
    is_prompt_only = has_echo and options.get("max_new_tokens") == 0
    if has_echo:
        options["prompt_logprobs"] = options["logprobs"]
    if is_prompt_only:
        options["max_new_tokens"] = 1
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
    names = [request_id] if len(prompts) == 1 else [f"{request_id}-{number}" for number in range(len(prompts))]
    requests = tuple(
        Request(prompt, params, name, model, cache=cache, at_once=not is_streamed)
        for name, prompt in zip(names, prompts, strict=True)
    )
    return CompletionCall(requests, params, is_streamed, has_usage, has_echo, is_prompt_only)


def reason_of(reason: FinishReason) -> str:
    """Returns OpenAI's name of a reason to finish."""
    return "length" if reason is FinishReason.LENGTH else "stop"


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
