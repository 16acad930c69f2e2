"""JSON from untrusted files: bounded in size, depth and number of values; duplicate keys and NaN are refused."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection
from typing import Any, Final

from ...core.errors import ManifestError

MAX_DEPTH: Final = 32
MAX_NODES: Final = 20_000_000
MIN_BYTES: Final = 3  # average bytes of text per value; a document made to exhaust memory has fewer
MIN_STRING_BYTES: Final = 8  # average bytes of text per string
FREE_NODES: Final = 10_000  # values or strings to which these averages do not apply
MAX_INT: Final = 2**62
_MAX_NAMES: Final = 4  # names in a path
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


def parse(data: bytes, what: str, max_nodes: int = MAX_NODES) -> Any:
    """Parses a JSON document.

    Args:
        data: the document.
        what: the document's source, for messages.
        max_nodes: the largest number of objects, arrays and values.

    Raises:
        ManifestError: `data` is not valid UTF-8 or JSON, has a duplicate key, NaN or infinity, is nested too deep, or
            has too many values, in all or for its size.
    """
    check_counts(data, what, max_nodes)
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=lambda name: _refuse(f"{what} holds {name}, which is not valid JSON."),
            parse_float=lambda text: _finite(text, what),
        )
    except _DuplicateKey as error:
        raise ManifestError(f"{what} has the key {error.args[0][:80]!r} twice in one object.") from None
    except UnicodeDecodeError as error:
        raise ManifestError(f"{what} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError:
        raise ManifestError(f"{what} is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as error:
        raise ManifestError(f"{what} is not JSON: {error}.") from error
    if isinstance(document, dict | list):
        _check_depth(document, what)
    return document


def check_counts(data: bytes, what: str, max_nodes: int = MAX_NODES) -> None:
    """Raises ManifestError if a document would take many times its size in memory.

    The count is an upper bound: punctuation inside strings counts too, which spares a first parse.
    """
    nodes = data.count(b",") + data.count(b"[") + data.count(b"{")
    if nodes > max_nodes:
        raise ManifestError(f"{what} holds more than {max_nodes} values.")
    for count, kind, min_bytes in ((nodes, "values", MIN_BYTES), (data.count(b'"') // 2, "strings", MIN_STRING_BYTES)):
        if count > FREE_NODES + len(data) // min_bytes:
            raise ManifestError(
                f"{what} holds {count} {kind} in {len(data)} bytes; at least {min_bytes} bytes each are required."
            )


def dump(document: Any) -> bytes:
    """Returns a document as tk writes JSON: compact, in UTF-8."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def members(value: Any, what: str, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """Returns `value` as an object with all required keys, and no others than the optional ones."""
    found = mapping(value, what)
    missing = [key for key in required if key not in found]
    unknown = [key for key in found if key not in required and key not in optional]
    if missing or unknown:
        wrong = f"lacks {missing[0]!r}" if missing else f"has an unknown key {unknown[0][:80]!r}"
        raise ManifestError(f"{what} {wrong}; its keys are {', '.join([*required, *optional])}.")
    return found


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Returns `value` as an object."""
    if not isinstance(value, dict):
        raise ManifestError(f"{what} must be an object.")
    return value


def array(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Returns `value` as an array, of `length` items if given."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ManifestError(f"{what} must be an array{'' if length is None else f' of {length}'}.")
    return value


def integer(value: Any, what: str, low: int = 0, high: int = MAX_INT) -> int:
    """Returns `value` as an integer in [low, high]; a bool or a float is refused."""
    if type(value) is not int or not low <= value <= high:
        raise ManifestError(f"{what} must be an integer from {low} to {high}.")
    return value


def text(value: Any, what: str, max_length: int = 512) -> str:
    """Returns `value` as a printable string."""
    if not isinstance(value, str) or len(value) > max_length or not value.isprintable():
        raise ManifestError(f"{what} must be a printable string of at most {max_length} characters.")
    return value


def tensor_name(value: Any, what: str) -> str:
    """Returns `value` as the name of a tensor: a printable string that is not empty."""
    if value == "":
        raise ManifestError(f"{what}: a tensor's name is empty. Give the tensor a name and save the model again.")
    return text(value, what)


def digest(value: Any, what: str) -> str:
    """Returns `value` as a SHA-256 in lower-case hex."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ManifestError(f"{what} must be a SHA-256 in hex.")
    return value


def file_name(value: Any, what: str) -> str:
    """Returns `value` as a name inside one folder: letters, digits, dot, dash, underscore; never a path."""
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise ManifestError(
            f"{what}: {str(value)[:80]!r} is not a plain file name (letters, digits, dot, dash and underscore)."
        )
    return value


def file_path(value: Any, what: str) -> str:
    """Returns `value` as a path inside one folder: at most 4 names as of `file_name` joined by "/", so never "..".

    Raises:
        ManifestError: it is no such path.
    """
    names = value.split("/") if isinstance(value, str) else [""]
    if len(names) <= _MAX_NAMES and all(_FILE_NAME.fullmatch(name) for name in names):
        return str(value)
    return file_name(value, what)  # raises


class _DuplicateKey(Exception):
    """Carries a key that occurs twice in one object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return found


def _finite(number: str, what: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        _refuse(f"{what} holds a number beyond the range of a double.")
    return value


def _refuse(message: str) -> None:
    raise ManifestError(message)


def _check_depth(document: Any, what: str) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise ManifestError(f"{what} is nested deeper than {MAX_DEPTH} levels.")
