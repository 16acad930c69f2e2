"""Where text comes from: files, folders, JSON lines, and the Python standard library as found on this machine."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..core.errors import ConfigError
from .examples import Document, parse_line

STDLIB: Final = "stdlib"
# Tests, other people's packages, and tables that a script wrote: not the Python that people write.
STDLIB_EXCLUDED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"}
)


def _ignore(_num_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus; `named` by the user rather than found in a folder, it must be readable."""

    path: Path
    num_bytes: int
    named: bool = False


@dataclass
class Corpus:
    """Files to read documents from.

    Attributes:
        files: in the order of reading.
        skipped: files found in folders that turned out to be no text; filled by `documents`.
    """

    files: tuple[SourceFile, ...]
    skipped: list[Path] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)

    def texts(self, advance: Callable[[int], None] = _ignore) -> Iterator[str]:
        """The texts of all documents; see `documents`."""
        return (each if isinstance(each, str) else each.text for each in self.documents(advance))

    def documents(self, advance: Callable[[int], None] = _ignore) -> Iterator[Document]:
        """The documents, one file at a time; `advance` is told of bytes as they are read.

        Raises:
            ConfigError: a named file cannot be read, or a JSON line is no document.
        """
        self.skipped.clear()
        for file in self.files:
            if file.path.suffix.lower() == ".jsonl":
                yield from _json_lines(file.path, advance)
                continue
            text = self._read(file)
            advance(file.num_bytes)
            if text:
                yield text

    def _read(self, file: SourceFile) -> str:
        try:
            return file.path.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            if file.named:
                raise ConfigError(f"Cannot read {file.path} as UTF-8 text: {error}.") from error
            self.skipped.append(file.path)
            return ""


def find_corpus(inputs: Sequence[str | Path]) -> Corpus:
    """The files behind the words of a command line: "stdlib", files, and folders (with all files below them).

    The files of a folder come in an order that is always the same and mixes them, so that the tail of a corpus, which
    is held out for evaluation, is a fair sample of it. Hidden files and folders are left out.

    Raises:
        ConfigError: an input does not exist, is a pipe or a device, is Parquet, or there is no file at all.
    """
    files: list[SourceFile] = []
    for item in inputs:
        path = Path(item)
        if item == STDLIB:
            files += stdlib_corpus().files
        elif path.is_dir():
            files += [_source(found) for found in _mixed(path, _visible_files(path))]
        elif path.is_file():
            files.append(_source(path, named=True))
        else:
            problem = "is neither a regular file nor a folder" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {problem}; an input is a file, a folder, or the word {STDLIB!r}.")
    if not files:
        raise ConfigError(f"No files in {', '.join(map(str, inputs))}; name text files, .jsonl files, or folders.")
    return Corpus(tuple(files))


def stdlib_corpus() -> Corpus:
    """The Python sources of the running interpreter's standard library: several hundred documents, about 10 MB.

    Raises:
        ConfigError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in root.rglob("*.py")
        if not STDLIB_EXCLUDED.intersection(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    ]
    if not paths:
        raise ConfigError(
            f"This Python has no library sources in {root}; give a text file or folder instead of {STDLIB!r}."
        )
    return Corpus(tuple(_source(path) for path in _mixed(root, paths)))


def _source(path: Path, named: bool = False) -> SourceFile:
    if path.suffix.lower() == ".parquet":
        raise ConfigError(
            f'{path}: Parquet is not read; convert it to JSON lines, each {{"text": ...}}, in a file named *.jsonl.'
        )
    return SourceFile(path, path.stat().st_size, named)


def _visible_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(folder, name) for name in names if not name.startswith(".") and Path(folder, name).is_file())


def _mixed(root: Path, paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(root))).digest())


def _json_lines(path: Path, advance: Callable[[int], None]) -> Iterator[Document]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                advance(len(line))
                document = parse_line(line, f"{path}:{number}") if line.strip() else ""
                if document:
                    yield document
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
