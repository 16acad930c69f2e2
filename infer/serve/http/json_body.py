"""Bodies of JSON: structure and depth are bounded before Python makes values of them, and fields taken one by one."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from ....core.errors import InvalidRequest

JSON: Final = "application/json"
MAX_STRUCTURE: Final = 20_000
MAX_DEPTH: Final = 64
# A body of this many bytes takes less than a millisecond of the event loop.
_LOOP_BYTES: Final = 16 << 10
_ID_LIST: Final = re.compile(rb"\[[0-9,\s]*\]")
T = TypeVar("T")
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NOT_STRUCTURE: Final = bytes(byte for byte in range(256) if byte not in b"[]{}:,")


async def parsed(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """Returns what `read` makes of the object of a body; large ones are parsed and read on another thread.

    Raises:
        InvalidRequest: the body is no JSON object, names a key twice, holds NaN, or has too much structure.
    """
    if len(body) <= _LOOP_BYTES:
        return read(parse(body))
    return await asyncio.to_thread(lambda: read(parse(body)))


def parse(body: bytes) -> dict[str, Any]:
    """Returns the object of a body; see `parsed`."""
    _check_structure(body)
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not JSON in UTF-8: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body is a JSON {type(value).__name__}; it must be an object.")
    return value


def _check_structure(body: bytes) -> None:
    """Counts what costs memory once it is parsed. A body that is not JSON may pass: then the parser refuses it."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * MAX_STRUCTURE + 2:  # strings have structure between them
        raise _too_much()
    outside = b'""'.join(plain.split(b'"')[::2])
    rest = _ID_LIST.sub(b"0", outside)
    if len(rest.translate(None, _NOT_STRUCTURE)) > MAX_STRUCTURE:
        raise _too_much()
    depth = 0
    for bracket in rest.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"The body nests more than {MAX_DEPTH} objects and arrays.")


def _too_much() -> InvalidRequest:
    return InvalidRequest(
        f"The body has more than {MAX_STRUCTURE} brackets, commas and colons outside of strings and lists of token ids."
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"The body has the key {twice[:100]!r} twice in one object.", field=twice[:100])
    return made


def _no_constant(name: str) -> float:
    raise InvalidRequest(f"The body has {name}, which is not JSON.")


def dumped(value: Mapping[str, Any]) -> bytes:
    """Returns a value as JSON without spaces, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


class Fields:
    """The fields of one object. A field that is null counts as unset, as in OpenAI's own interface.

    Args:
        values: the object.
        path: the names that lead to it, with a dot at the end; "" for the body.

    Raises:
        InvalidRequest: by each method, if the field has another type; the error names it.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self.path = path

    def text(self, name: str) -> str | None:
        value = self.anything(name)
        return value if value is None else self.as_text(value, name)

    def flag(self, name: str) -> bool:
        return bool(self._checked(name, lambda value: isinstance(value, bool), "true or false"))

    def number(self, name: str) -> float | None:
        value = self.anything(name)
        return value if value is None else self._as_number(value, name)

    def integer(self, name: str, most: int = 2**32 - 1) -> int | None:
        right = f"an integer from 0 to {most}"
        number: int | None = self._checked(name, lambda value: type(value) is int and 0 <= value <= most, right)
        return number

    def numbers_by_id(self, name: str) -> dict[int, float]:
        """Takes an object whose keys are token ids in decimal digits."""
        value = self._checked(name, _is_object, "an object of token ids and numbers") or {}
        for key in value:
            if not _is_id(key):
                raise self.wrong(name, key, "an object whose keys are token ids")
        return {int(key): self._as_number(number, name) for key, number in value.items()}

    def texts(self, name: str) -> list[str]:
        """Takes a text or a list of texts."""
        value = self._checked(name, lambda value: isinstance(value, str | list), "a string or a list of strings")
        return [self.as_text(text, name) for text in ([value] if isinstance(value, str) else value or [])]

    def integers(self, name: str) -> list[int]:
        """Takes a list of token ids."""
        return self._checked(name, is_id_list, "a list of token ids") or []

    def objects(self, name: str) -> list["Fields"]:
        """Takes a list of objects."""
        value = self.anything(name)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(name, value, "a list of objects")
        return [Fields(one, f"{self.path}{name}[{index}].") for index, one in enumerate(value)]

    def object(self, name: str) -> "Fields | None":
        value = self._checked(name, _is_object, "an object")
        return None if value is None else Fields(value, f"{self.path}{name}.")

    def anything(self, name: str) -> Any:
        """Takes a field of any type; None if it is unset."""
        return self._left.pop(name, None)

    def only(self, name: str, *right: Any) -> None:
        """Takes a field of which this server knows some values, which ask for what a field that is unset does."""
        value = self.anything(name)
        if value is not None and all(value != one or isinstance(value, bool) != isinstance(one, bool) for one in right):
            raise self._refused(name, is_known=True)

    def refuse_rest(self, not_built: frozenset[str] = frozenset()) -> None:
        """Refuses the first field that was not taken.

        Args:
            not_built: the fields of OpenAI's interface that this server knows and does not implement.
        """
        for name in self._left:
            raise self._refused(name, name in not_built)

    def wrong(self, name: str, value: Any, right: str) -> InvalidRequest:
        """Returns the error of a field with a wrong value."""
        shown = "unset" if value is None else repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        message = f"{self.path}{name} is {shown}; it must be {right}."
        return InvalidRequest(message, field=self.path + name, given=value)

    def as_text(self, value: Any, name: str) -> str:
        """Returns a value of a field, if it is a text."""
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise self.wrong(name, "with half a surrogate pair", "text that UTF-8 can hold")
        return value

    def _refused(self, name: str, is_known: bool) -> InvalidRequest:
        field = f"{self.path}{name}"[:200]
        what = "not built in this version of tk" if is_known else "unknown to this server"
        return InvalidRequest(f"{field} is {what}; leave it unset.", field=field)

    def _checked(self, name: str, is_right: Callable[[Any], bool], right: str) -> Any:
        """Takes a field; None if it is unset."""
        value = self.anything(name)
        if value is not None and not is_right(value):
            raise self.wrong(name, value, right)
        return value

    def _as_number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2.0**127:
            raise self.wrong(name, value, "a finite number")
        return float(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_id_list(value: Any) -> bool:
    """Returns whether a value is a list of token ids; of those that a body can hold, in a few milliseconds."""
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**32 for token in value)


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**32
