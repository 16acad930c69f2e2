"""The choices of answers in OpenAI's two dialects: texts and messages, whole or in chunks, and log-probabilities."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...engine.request.completion import Choice
from ...engine.request.events import FinishReason, TokenLogprob, Usage


class Dialect(Protocol):
    """The form of the answers of one path."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, choice: Choice, index: int, has_logprobs: bool) -> dict[str, Any]:
        """Returns a complete choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the first chunk of a choice, if there is one before its text."""

    def chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """Returns a chunk of a choice: some text, or its end."""

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns log-probabilities of tokens."""


class TextDialect:
    """The form of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def whole(self, choice: Choice, index: int, has_logprobs: bool) -> dict[str, Any]:
        logprobs = self.logprobs(choice.logprobs) if has_logprobs else None
        return self.chunk(index, choice.text, logprobs, reason_of(choice.finish_reason))

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
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
    """The form of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

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


def reason_of(reason: FinishReason) -> str:
    """Returns OpenAI's name of a reason to finish."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def usage_of(usages: Sequence[Usage]) -> dict[str, Any]:
    """Returns the numbers of tokens of all prompts of a call."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


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
