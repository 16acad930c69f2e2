"""The body of a request as a JSON object; structure and depth are bounded before Python makes values of it."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ....core.errors import InvalidRequest

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
