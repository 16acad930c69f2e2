"""The fields that a row or a message may have beside those that are learned: without effect, or refused by name."""

from types import MappingProxyType
from typing import Any, Final

# Names, origins and descriptions of a row, which no data format of language models gives another meaning.
METADATA: Final = frozenset(
    {"id", "_id", "idx", "index", "uid", "uuid", "row_id", "prompt_id", "conversation_id", "session_id", "hash"}
    | {"source", "dataset", "dataset_name", "subset", "split", "origin", "url", "file", "path", "author", "license"}
    | {"date", "time", "timestamp", "created", "created_at", "updated_at", "version"}
    | {"language", "lang", "locale", "category", "topic", "tags", "keywords", "meta", "metadata", "comment", "comments"}
)
_PREFERENCE: Final = "is preference data, which tk does not train on"
_MEDIA: Final = "holds more than text, and tk trains on text alone"
_MESSAGE: Final = "belongs into a message of the row, not beside the messages"
_QUESTION: Final = 'is no field that tk knows the meaning of: write "prompt" and "response"'
_REFUSED_OF_ROWS: Final = MappingProxyType(
    {
        **dict.fromkeys(("chosen", "rejected", "score_chosen", "score_rejected", "preference"), _PREFERENCE),
        **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
        **dict.fromkeys(("tool_calls", "tool_call_id", "name", "role", "content"), _MESSAGE),
        **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "think"), _MESSAGE),
        **dict.fromkeys(
            ("question", "answer", "answers", "query", "target", "targets", "inputs", "outputs"), _QUESTION
        ),
        "functions": 'is the old name of tools: write "tools", each as {"type": "function", "function": ...}',
        "function_call": 'is the old name of a tool call: write "tool_calls" in the assistant\'s message',
        "parallel_tool_calls": "has an effect in OpenAI's service alone; a chat template can get it in "
        '"chat_template_kwargs"',
        "label": "marks a good or a bad response (KTO), which tk does not train on",
        "weight": "of a whole row is not supported; only a message has a weight",
        "weights": "of a whole row is not supported; only a message has a weight",
        "history": 'is not supported: write all turns as "messages"',
        **dict.fromkeys(
            ("tools", "documents", "chat_template_kwargs"), 'goes through a chat template: write the row as "messages"'
        ),
        "system": 'goes through a chat template: write it as the first of "messages"',
        "input": 'belongs to "instruction" and "output"',
    }
)
_REFUSED_OF_MESSAGES: Final = MappingProxyType(
    {
        **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
        "function_call": 'is the old name of a tool call: write "tool_calls"',
        "refusal": 'is not learned by tk: write it as "content"',
        "tools": "belongs beside the messages, not into one",
        "documents": "belongs beside the messages, not into one",
    }
)
# The values with which a field is as good as absent.
_NEUTRAL: Final = MappingProxyType({"parallel_tool_calls": (True,), "weight": (1, "1", "1.0")})


def is_neutral(name: str, value: Any) -> bool:
    """Returns whether a field with this value means the same as none."""
    return value is None or value in ("", [], {}) or value in _NEUTRAL.get(name, ())


def refusal_in_row(name: str, is_text: bool) -> str:
    """Returns why a field beside those that a row's shape has is refused; "" if it has no effect.

    Args:
        name: the field.
        is_text: whether all of the row's text is learned as it is; a field of unknown meaning then cannot change it.
    """
    if is_text and name == "label":  # the class of a text, in data for classifiers
        return ""
    if name in _REFUSED_OF_ROWS:
        return _REFUSED_OF_ROWS[name]
    return "" if is_text or name in METADATA else "is no field that tk knows the meaning of"


def refusal_in_message(name: str) -> str:
    """Returns why a field beside those that a message has is refused; "" if it has no effect."""
    if name in _REFUSED_OF_MESSAGES:
        return _REFUSED_OF_MESSAGES[name]
    return "" if name in METADATA else "is no field of a message that tk knows the meaning of"
