"""The choices of answers in OpenAI's two dialects: texts and messages, whole or in chunks, and log-probabilities."""

from collections.abc import Sequence
from typing import Any, Protocol

from ..requests.completion import Choice
from ..requests.events import FinishReason, TokenLogprob, Usage


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
        return {
            "tokens": [_shown(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{_shown(top.token): top.logprob for top in entry.top} for entry in entries],
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
    return {"token": _shown(token), "logprob": logprob, "bytes": list(token)}


def _shown(token: bytes) -> str:
    return token.decode("utf-8", errors="replace")
