"""Takes the fields of a JSON object one by one, each with its type, and refuses those that are left, by name."""

from collections.abc import Mapping
from typing import Any

from ....core.errors import InvalidRequest


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
        value = self._take(name)
        return value if value is None else self._as_text(value, name)

    def flag(self, name: str) -> bool:
        value = self._take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def number(self, name: str) -> float | None:
        value = self._take(name)
        if value is None:
            return None
        return self._as_number(value, name)

    def integer(self, name: str, most: int = 2**32 - 1) -> int | None:
        value = self._take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most):
            raise self.wrong(name, value, f"an integer from 0 to {most}")
        return value

    def numbers_by_id(self, name: str) -> dict[int, float]:
        """Takes an object whose keys are token ids in decimal digits."""
        value = self._take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object of token ids and numbers")
        wrong = next((key for key in value if not _is_id(key)), None)
        if wrong is not None:
            raise self.wrong(name, wrong, "an object whose keys are token ids")
        return {int(key): self._as_number(number, name) for key, number in value.items()}

    def texts(self, name: str) -> list[str]:
        """Takes a text or a list of texts."""
        value = self._take(name)
        if value is None or isinstance(value, str):
            return [] if value is None else [self._as_text(value, name)]
        if not isinstance(value, list):
            raise self.wrong(name, value, "a string or a list of strings")
        return [self._as_text(text, name) for text in value]

    def integers(self, name: str) -> list[int]:
        """Takes a list of token ids."""
        value = self._take(name)
        if value is None:
            return []
        if not is_id_list(value):
            raise self.wrong(name, value, "a list of token ids")
        return list(value)

    def objects(self, name: str) -> list["Fields"]:
        """Takes a list of objects."""
        value = self._take(name)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(name, value, "a list of objects")
        return [Fields(one, f"{self.path}{name}[{index}].") for index, one in enumerate(value)]

    def object(self, name: str) -> "Fields | None":
        value = self._take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(value, f"{self.path}{name}.")

    def anything(self, name: str) -> Any:
        """Takes a field of any type; None if it is unset."""
        return self._take(name)

    def only(self, name: str, right: Any) -> None:
        """Takes a field of which this server knows one value, that of a field that is unset."""
        value = self._take(name)
        if value is not None and (value != right or isinstance(value, bool) != isinstance(right, bool)):
            raise InvalidRequest(
                f"{self.path}{name} is not built in this version of tk; leave it unset.", field=self.path + name
            )

    def refuse_rest(self, not_built: frozenset[str] = frozenset()) -> None:
        """Refuses the first field that was not taken.

        Args:
            not_built: the fields of OpenAI's interface that this server knows and does not implement.
        """
        for name in self._left:
            field = f"{self.path}{name}"[:200]
            if name in not_built:
                raise InvalidRequest(f"{field} is not built in this version of tk; leave it unset.", field=field)
            raise InvalidRequest(f"{field} is unknown to this server; leave it unset.", field=field)

    def wrong(self, name: str, value: Any, right: str) -> InvalidRequest:
        """Returns the error of a field with a wrong value."""
        shown = "unset" if value is None else repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        message = f"{self.path}{name} is {shown}; it must be {right}."
        return InvalidRequest(message, field=self.path + name, given=value)

    def _take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def _as_text(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise self.wrong(name, "with half a surrogate pair", "text that UTF-8 can hold")
        return value

    def _as_number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2.0**127:
            raise self.wrong(name, value, "a finite number")
        return float(value)


def is_id_list(value: Any) -> bool:
    """Returns whether a value is a list of token ids; of those that a body can hold, in a few milliseconds."""
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**32 for token in value)


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**32
