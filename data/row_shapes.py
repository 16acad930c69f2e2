"""The shapes of rows, whichever file holds them. A row has one shape, and no field that would be lost without a word.

{"text": "..."}                                         a text, all of which is learned
{"prompt": "...", "response": "..."}                    the response (or "completion") and the end of text are learned
{"messages": [{"role": "user", "content": "..."}, ...]} the assistant's turns are learned, their ends included
{"instruction": "...", "input": "...", "output": "..."} Alpaca's form of a conversation of two messages
{"conversations": [{"from": "human", "value": "..."}]}  ShareGPT's form of messages
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..core.errors import ConfigError
from .examples import Document
from .row_documents import CONTEXT, read_alpaca, read_chat, read_prompt, read_sharegpt, read_text
from .row_fields import is_neutral, refusal_in_row

KNOWN: Final = (
    'a row has a string "text", strings "prompt" and "response" (or "completion"), "messages", strings "instruction" '
    'and "output" (Alpaca), or "conversations" (ShareGPT)'
)


class RowReader:
    """Makes documents of rows.

    Args:
        ignored: fields of rows and messages to leave out.

    Attributes:
        without_effect: the number of rows that had a field without effect, by the field's name.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self.without_effect: dict[str, int] = {}

    def read(self, value: object, where: str) -> Document | None:
        """Returns the document of a row; None if the row is empty: its text is "", or all of its fields are null.

        Args:
            value: the row.
            where: the file and the row, with which errors begin.

        Raises:
            ConfigError: the row has none of the shapes, or several, or a field that is wrong or would be lost.
        """
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: the row must be an object: {KNOWN}.")
        fields = {name: each for name, each in value.items() if each is not None and name not in self._ignored}
        shape = _shape(fields, where)
        if shape is None:
            if _shapes(value):
                return None
            raise ConfigError(f"{where}: the row has {_listed(value)}, but {KNOWN}. Rename a field.")
        for name, each in fields.items():
            if name not in shape.fields:
                self._check_other(name, each, shape, where)
        return shape.read(fields, where, self._ignored)

    def _check_other(self, name: str, value: object, shape: "_Shape", where: str) -> None:
        if is_neutral(name, value):
            return
        reason = refusal_in_row(name, shape.name == "text")
        if reason:
            raise ConfigError(f'{where}: "{name}" {reason}. To leave the field out, pass --ignore {name}.')
        self.without_effect[name] = self.without_effect.get(name, 0) + 1


@dataclass(frozen=True)
class _Shape:
    """A shape of rows.

    Attributes:
        name: the shape's name.
        marks: the fields of which any says that a row has this shape.
        fields: all fields of the shape.
        read: makes the document of a row's fields, with (fields, where, ignored).
    """

    name: str
    marks: frozenset[str]
    fields: frozenset[str]
    read: Callable[[Mapping[str, Any], str, Collection[str]], Document | None]


def holds_rows(text: str) -> bool:
    """Returns whether a text, or an array in it, begins with an object of JSON that has a field that marks a row."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(_shapes(value))


def check_columns(columns: Sequence[str], where: str) -> None:
    """Raises ConfigError if columns of these names are not those of a shape of rows, or not all of them."""
    if len(set(columns)) < len(columns):
        raise ConfigError(f"{where}: two columns have the same name, among {', '.join(columns)}.")
    if not _shapes(columns):
        raise ConfigError(f"{where}: the first line names {_listed(columns)} as columns, but {KNOWN}. Rename a column.")


def _shapes(names: Iterable[str]) -> list[_Shape]:
    found = frozenset(names)
    return [shape for shape in _SHAPES if found & shape.marks]


def _shape(fields: Mapping[str, Any], where: str) -> _Shape | None:
    found = _shapes(fields)
    if len(found) > 1:
        marks = [name for shape in found for name in sorted(shape.marks & fields.keys())]
        raise ConfigError(
            f"{where}: the row has several shapes at once, by its fields {_listed(marks)}, so it is not clear which to "
            f"learn. Leave fields out, as by --ignore {marks[0]}."
        )
    return found[0] if found else None


def _listed(names: Iterable[str]) -> str:
    quoted = [f'"{name}"' for name in names][:20]
    return ", ".join(quoted) or "no fields"


def _make(name: str, marks: str, others: Iterable[str], read: Any) -> _Shape:
    found = frozenset(marks.split())
    return _Shape(name, found, found | set(others), read)


_SHAPES: Final = (
    _make("text", "text", (), read_text),
    _make("prompt", "prompt response completion", CONTEXT, read_prompt),
    _make("messages", "messages", CONTEXT, read_chat),
    _make("Alpaca", "instruction output", ("input", "system", *CONTEXT), read_alpaca),
    _make("ShareGPT", "conversations", ("system", *CONTEXT), read_sharegpt),
)
