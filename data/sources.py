"""The sources of text: files, folders, JSON lines, and the Python standard library of this machine."""

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
# Folders of tests, installed packages and generated tables, which are not the Python that people write.
STDLIB_EXCLUDED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"}
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


@dataclass
class Corpus:
    """The files from which documents are read.

    Attributes:
        files: the files, in the order of reading.
        skipped: the files of folders that cannot be read as UTF-8 text, and folders below them that cannot be listed;
            `documents` fills it.
    """

    files: tuple[SourceFile, ...]
    skipped: list[Path] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files)

    def texts(self, advance: Callable[[int], None] = _ignore) -> Iterator[str]:
        """Yields the texts of all documents; see `documents`."""
        return (each if isinstance(each, str) else each.text for each in self.documents(advance))

    def documents(self, advance: Callable[[int], None] = _ignore) -> Iterator[Document]:
        """Yields the documents, file by file.

        Args:
            advance: a function that is called with the number of bytes of each read.

        Raises:
            ConfigError: a named file cannot be read, or a line of JSON is no document.
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
    """Returns the corpus of the inputs of a command line: "stdlib", files, and folders with all files below them.

    The files of a folder are shuffled in a fixed order, so that the end of the corpus, which is held out for
    evaluation, is a fair sample of it. Hidden files and folders are left out.

    Raises:
        ConfigError: an input does not exist, is a pipe or a device or Parquet, or is a folder that cannot be listed; or
            the inputs have no file.
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
        raise ConfigError(f"No files in {', '.join(map(str, inputs))}: name text files, .jsonl files, or folders.")
    return Corpus(tuple(files))


def stdlib_corpus() -> Corpus:
    """Returns the Python sources of this interpreter's standard library: several hundred documents, about 10 MB.

    Raises:
        ConfigError: this Python was installed without its sources.
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
            f'{path}: Parquet files are not supported; convert it to JSON lines of the form {{"text": ...}}, in a file '
            "whose name ends in .jsonl."
        )
    return SourceFile(path, path.stat().st_size, named)


def _visible_files(root: Path) -> Iterator[Path]:
    """Yields the files below a folder, and the folders that cannot be listed, which `documents` then skips."""
    unlisted: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=unlisted.append):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(folder, name) for name in names if not name.startswith(".") and Path(folder, name).is_file())
    for error in unlisted:
        if Path(error.filename) == root:
            raise ConfigError(f"Cannot list {root}: {error.strerror}.") from error
        yield Path(error.filename)


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
