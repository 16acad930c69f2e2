"""Rows of JSON: a row per line, or an array or a sequence of objects, which is read in pieces."""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from ..core.errors import ConfigError
from .source_bytes import Advance, RawRow, SourceBytes, source_bytes

_CHUNK: Final = 1 << 20
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
# The longest beginning of a number, a word or an escape that may go on in the next piece of text.
_LONGEST_WORD: Final = 16


def json_lines(path: Path, advance: Advance) -> Iterator[RawRow]:
    """Yields the row of each line that is not blank.

    Raises:
        ConfigError: the file cannot be read, or a line is not JSON in UTF-8.
    """
    with source_bytes(path, advance) as file:
        for number, line in enumerate(file.stream, start=1):
            file.report()
            where = f"{path}:{number}"
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: the line is not UTF-8 text: {error}.") from error
            if text.strip():
                yield RawRow(where, parse_json(text, where))


def json_values(path: Path, advance: Advance) -> Iterator[RawRow]:
    """Yields the elements of an array, or else all values of a file, without the whole file in memory.

    Raises:
        ConfigError: the file cannot be read, or is not JSON in UTF-8.
    """
    with source_bytes(path, advance) as file:
        text = _Text(file)
        yield from (_array if text.next_character() == "[" else _sequence)(text, path)


def _sequence(text: "_Text", path: Path) -> Iterator[RawRow]:
    number = 0
    while text.next_character():
        number += 1
        where = f"{path}: row {number}"
        yield RawRow(where, text.value(where))


def _array(text: "_Text", path: Path) -> Iterator[RawRow]:
    number = 0
    text.skip()
    if text.next_character() != "]":
        while True:
            number += 1
            where = f"{path}: row {number}"
            yield RawRow(where, text.value(where))
            if text.next_character() != ",":
                break
            text.skip()
    if text.next_character() != "]":
        raise ConfigError(f'{path}: after row {number} the array of rows must go on with "," or end with "]".')
    text.skip()
    if text.next_character():
        raise ConfigError(f"{path}: something follows the array of rows.")


def parse_json(text: str, where: str) -> Any:
    """Parses one document of JSON; `where` begins the errors.

    Raises:
        ConfigError: it is not JSON, has a key twice, NaN or infinity, or text that is not Unicode.
    """
    try:
        value = _DECODER.decode(text)
        _check_unicode(value, text)
    except (ValueError, RecursionError) as error:
        raise _not_json(where, error) from error
    return value


class _Text:
    """The text of a file, of which one piece is in memory."""

    def __init__(self, file: SourceBytes) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended = "", 0, False

    def next_character(self) -> str:
        """Returns the next character that is not blank; "" at the end."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def skip(self) -> None:
        """Goes past the next character."""
        self._at += 1

    def value(self, where: str) -> Any:
        """Returns the value that begins at the next character that is not blank, and goes past it."""
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                _check_unicode(value, self._text[self._at : end])
            except json.JSONDecodeError as error:
                # Only an error near the end of the piece, or a string without an end, may be right in the whole file.
                cut = error.pos >= len(self._text) - _LONGEST_WORD or error.msg.startswith("Unterminated string")
                if cut and self._read():
                    continue
                raise _not_json(where, error, self._at) from error
            except (ValueError, RecursionError) as error:
                raise _not_json(where, error) from error
            self._at = end
            return value

    def _read(self) -> bool:
        """Reads a piece, as long as the text that is left if that is long; returns False at the end of the file."""
        if self._ended:
            return False
        left = self._text[self._at :]
        data = self._file.stream.read(max(_CHUNK, len(left)))
        self._file.report()
        self._ended = not data
        self._text, self._at = left + self._decoder.decode(data, self._ended), 0
        return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {key!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which JSON does not have: write null")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _check_unicode(value: Any, source: str) -> None:
    """Raises UnicodeEncodeError if an escape of half a character stands alone."""
    if _SURROGATE.search(source):
        json.dumps(value, ensure_ascii=False).encode()


def _not_json(where: str, error: Exception, start: int = 0) -> ConfigError:
    """Returns the error of a row that begins at the character `start`."""
    if isinstance(error, json.JSONDecodeError):
        place = f"at character {error.pos - start + 1} of the row"
        form = 'A .jsonl file has one whole object per line, as {"text": "..."}; a .json file holds an array of them.'
        return ConfigError(f"{where}: the row is not valid JSON: {error.msg} {place}. {form}")
    if isinstance(error, UnicodeEncodeError):
        return ConfigError(f"{where}: the row has text that is not valid Unicode: {error}.")
    return ConfigError(f"{where}: the row is not valid JSON: {error}.")
