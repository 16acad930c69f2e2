"""The bytes of input files: decompressed, with the encoding checked, and the progress of reading them."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from ..core.errors import ConfigError

Advance = Callable[[int], None]

_OPENERS: Final[dict[str, Callable[[BinaryIO], Any]]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_OTHER_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32 LE begins like UTF-16


class RawRow(NamedTuple):
    """A row as its file holds it.

    Attributes:
        where: the file and the row, with which errors begin.
        value: the row: an object of JSON, if the file is right.
    """

    where: str
    value: object


class SourceBytes:
    """The bytes of one file.

    Attributes:
        stream: the content, decompressed.
    """

    def __init__(self, raw: io.FileIO, stream: Any, advance: Advance) -> None:
        self.stream = stream
        self._raw, self._advance, self._reported = raw, advance, 0

    def report(self) -> None:
        """Passes on the number of bytes of the file that were read since the last call."""
        read = self._raw.tell() - self._reported
        if read:
            self._reported += read
            self._advance(read)


@contextmanager
def source_bytes(path: Path, advance: Advance) -> Iterator[SourceBytes]:
    """Opens a file.

    Args:
        path: the file; a name that ends in .gz, .bz2 or .xz is that of a compressed file.
        advance: a function that `SourceBytes.report` calls with the number of bytes of each read.

    Raises:
        ConfigError: (also while the caller reads) the file cannot be read, its compressed content is damaged, or its
            text is not UTF-8.
    """
    opener = _OPENERS.get(path.suffix.lower(), io.BufferedReader)
    try:
        with path.open("rb", buffering=0) as raw, opener(raw) as stream:
            if stream.peek(4).startswith(_OTHER_MARKS):
                raise ConfigError(
                    f"{path} is UTF-16 or UTF-32 text: convert it to UTF-8, as by `iconv -f UTF-16 -t UTF-8`."
                )
            opened = SourceBytes(raw, stream, advance)
            yield opened
            opened.report()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: {error}. Convert it, as by `iconv -f LATIN1 -t UTF-8`, or leave the file out."
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error
