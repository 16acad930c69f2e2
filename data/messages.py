"""Messages of conversations: checked, and brought from ShareGPT's form into that of chat templates."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ..core.errors import ConfigError
from .row_fields import is_neutral, refusal_in_message

_STRINGS: Final = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_FIELDS: Final = frozenset({"role", "content", "tool_calls", "weight", *_STRINGS})
_SPEAKERS: Final = MappingProxyType(
    {
        "system": "system",
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot", "bing", "bard", "claude"), "assistant"),
    }
)


@dataclass(frozen=True)
class Messages:
    """The messages of a row.

    Attributes:
        given: the messages as the chat template takes them, without fields that are null.
        unlearned: the indexes of the assistant's messages that have the weight 0.
    """

    given: tuple[Mapping[str, Any], ...]
    unlearned: frozenset[int]


def read_messages(found: object, name: str, where: str, ignored: Collection[str]) -> Messages:
    """Checks the messages in a field of a row.

    Args:
        found: the field's value.
        name: the field's name.
        where: the file and the row, with which errors begin.
        ignored: fields to leave out.

    Raises:
        ConfigError: they are no messages, or a message has a field that tk does not know.
    """
    if not isinstance(found, list) or not found:
        raise ConfigError(f'{where}: "{name}" must be a list of at least one message.')
    given, unlearned = [], set()
    for index, message in enumerate(found):
        here = f"{where}: message {index + 1}"
        if not isinstance(message, dict):
            raise ConfigError(f'{here} must be an object with a string "role".')
        fields = {key: value for key, value in message.items() if value is not None and key not in ignored}
        if name == "conversations" and "role" not in fields:
            fields = _from_sharegpt(fields, here)
        _check(fields, here)
        if _weight(fields, here) == 0 and fields["role"] == "assistant":
            unlearned.add(index)
        given.append({key: value for key, value in fields.items() if key != "weight"})
    return Messages(tuple(given), frozenset(unlearned))


def _from_sharegpt(fields: dict[str, Any], here: str) -> dict[str, Any]:
    speaker, text = fields.get("from"), fields.get("value")
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise ConfigError(f'{here} must be an object with the strings "from" and "value", or "role" and "content".')
    if speaker not in _SPEAKERS:
        raise ConfigError(
            f'{here} has "from": {speaker!r}, which is none of {", ".join(_SPEAKERS)}. Write the row as "messages" '
            "with roles, and calls of tools as their tool_calls."
        )
    rest = {key: value for key, value in fields.items() if key not in ("from", "value")}
    return {"role": _SPEAKERS[speaker], "content": text, **rest}


def _check(fields: dict[str, Any], here: str) -> None:
    """Checks the fields of one message, and joins parts of text."""
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f'{here} must be an object with a string "role".')
    for name, value in fields.items():
        reason = "" if name in _FIELDS or is_neutral(name, value) else refusal_in_message(name)
        if reason:
            raise ConfigError(f'{here}: "{name}" {reason}. To leave the field out, pass --ignore {name}.')
    for name in _STRINGS:
        if not isinstance(fields.get(name, ""), str):
            raise ConfigError(f'{here}: "{name}" must be a string.')
    calls = fields.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ConfigError(f'{here}: "tool_calls" must be a list of objects.')
    if "content" in fields:
        fields["content"] = _text(fields["content"], here)
    elif not calls:
        raise ConfigError(f'{here} ({role}) has no "content" and no "tool_calls".')


def _text(content: object, here: str) -> str:
    """Returns the text of a content, parts of text joined as the server joins them."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ConfigError(f'{here}: "content" must be a string, or a list of parts of text.')
        texts.append(text)
    return "".join(texts)


def _weight(fields: Mapping[str, Any], here: str) -> float:
    """Returns a message's weight, 1 if it has none."""
    weight = fields.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ConfigError(f'{here}: "weight" must be 0 (not learned) or 1 (learned).')
    if "weight" in fields and weight == 1 and fields["role"] != "assistant":
        raise ConfigError(f'{here} ({fields["role"]}) has "weight": 1, but only the assistant\'s turns are learned.')
    return float(weight)
