"""A corpus: files of text and of rows, read as documents one after another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from ..core.errors import ConfigError
from .examples import Chat, Document
from .file_kinds import FileKind, kind_of, refusal
from .json_rows import json_lines, json_values
from .parquet_rows import parquet_rows
from .row_shapes import RowReader, holds_rows
from .source_bytes import Advance, RawRow, source_bytes
from .table_rows import table_rows

_ROW_READERS: Final = MappingProxyType[FileKind, Callable[[Path, Advance], Iterator[RawRow]]](
    {
        FileKind.LINES: json_lines,
        FileKind.JSON: json_values,
        FileKind.PARQUET: parquet_rows,
        FileKind.COMMAS: partial(table_rows, delimiter=","),
        FileKind.TABS: partial(table_rows, delimiter="\t"),
    }
)


def _ignore(_num_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Attributes:
        path: the file.
        num_bytes: its size.
        named: whether the user named the file; it must then be readable, unlike a file that was found in a folder.
    """

    path: Path
    num_bytes: int
    named: bool = False


class Skipped(NamedTuple):
    """A file or folder that a corpus left out, and a sentence that says why."""

    path: Path
    reason: str


@dataclass
class RowCounts:
    """The rows of the files that were read.

    Attributes:
        rows: all rows.
        empty: rows without text, which are left out.
        unlearned: conversations of which no token would be learned, which are left out.
        why: where the first of these is, and why.
    """

    rows: int = 0
    empty: int = 0
    unlearned: int = 0
    why: str = ""


@dataclass
class Corpus:
    """The files from which documents are read.

    Attributes:
        files: the files, in the order of reading.
        reader: makes documents of rows, and counts the fields that had no effect.
        skipped: the files of folders that hold no text or rows, files of rows that have none, and links and folders
            below them that cannot be followed or listed; `documents` fills it.
        counts: the rows, and those that were left out; `documents` fills it.
    """

    files: tuple[SourceFile, ...]
    reader: RowReader = field(default_factory=RowReader)
    skipped: list[Skipped] = field(default_factory=list)
    counts: RowCounts = field(default_factory=RowCounts)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files)

    def texts(self, advance: Advance = _ignore) -> Iterator[str]:
        """Yields the texts of all documents; see `documents`."""
        return (each if isinstance(each, str) else each.text for each in self.documents(advance))

    def documents(self, advance: Advance = _ignore) -> Iterator[Document]:
        """Yields the documents, file by file.

        Args:
            advance: a function that is called with the number of bytes of each read.

        Raises:
            ConfigError: a named file or a file of rows cannot be read, a row is wrong, or a file has rows and none of
                them can be learned.
        """
        self.skipped.clear()
        self.counts = RowCounts()
        self.reader.without_effect.clear()
        for file in self.files:
            if not refusal(file.path) and kind_of(file.path) is not FileKind.TEXT:
                yield from self._rows(file, advance)
                continue
            text = self._text(file)
            advance(file.num_bytes)
            if text:
                yield text

    def leave_out(self, chat: Chat) -> None:
        """Counts a conversation of which no token is learned, before the next document is asked for."""
        self.counts.unlearned += 1
        self.counts.why = self.counts.why or f"{chat.where}: {chat.why_unlearned()}"

    def _rows(self, file: SourceFile, advance: Advance) -> Iterator[Document]:
        before, self.counts = self.counts, RowCounts()  # those of this file alone, until its end
        try:
            yield from self._read_rows(file.path, advance)
        except ConfigError as error:
            if file.named or self.counts.rows > 1:
                raise
            raise ConfigError(
                f"{error} If {file.path.name} is no data, move it out of the folder, or name the files to read."
            ) from error
        found = self.counts
        if not found.rows:
            self.skipped.append(Skipped(file.path, f"{file.path} has no rows."))
        self.counts = RowCounts(
            before.rows + found.rows,
            before.empty + found.empty,
            before.unlearned + found.unlearned,
            before.why or found.why,
        )

    def _read_rows(self, path: Path, advance: Advance) -> Iterator[Document]:
        for where, value in _ROW_READERS[kind_of(path)](path, advance):
            self.counts.rows += 1
            document = self.reader.read(value, where)
            if document is None:
                self.counts.empty += 1
            else:
                yield document
        found = self.counts
        if found.rows and found.rows == found.empty + found.unlearned:
            raise ConfigError(
                f"{path}: there is nothing to learn in any of its {found.rows} rows: {found.empty} are empty, and "
                f"{found.unlearned} have no token to learn{f' ({found.why})' if found.unlearned else ''}."
            )

    def _text(self, file: SourceFile) -> str:
        try:
            return _read_text(file.path)
        except ConfigError as error:
            if file.named:
                raise
            self.skipped.append(Skipped(file.path, str(error)))
            return ""


def _read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        ConfigError: it cannot be read, is no text in UTF-8, or holds rows.
    """
    if reason := refusal(path):
        raise ConfigError(f"{path} {reason}.")
    if path.is_symlink() and path.is_dir():
        raise ConfigError(f"{path} is a link to a folder, which is not followed: name that folder as an input.")
    with source_bytes(path, _ignore) as file:
        text: str = file.stream.read().decode("utf-8-sig")
    if "\0" in text:
        raise ConfigError(f"{path} is not text: it has characters of code 0.")
    if text.startswith(("{", "[")) and holds_rows(text):
        raise ConfigError(f"{path} holds rows of JSON, but its name is that of a text: let it end in .jsonl or .json.")
    return text
