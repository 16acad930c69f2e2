"""The inputs of a command line as a corpus: files, folders, and the Python standard library of this machine."""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..core.errors import ConfigError
from ..core.given_paths import near_path
from .corpus import Corpus, SourceFile
from .file_kinds import FileKind, kind_of, refusal
from .parquet_rows import require_parquet
from .row_shapes import RowReader

STDLIB: Final = "stdlib"
# Folders of tests, installed packages and generated tables, which are not the Python that people write.
STDLIB_EXCLUDED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"}
)


def find_corpus(inputs: Sequence[str | Path], ignored: Collection[str] = ()) -> Corpus:
    """Returns the corpus of the inputs of a command line: "stdlib", files, and folders with all files below them.

    The files of a folder are shuffled in a fixed order, so that the end of the corpus, which is held out for
    evaluation, is a fair sample of it. Hidden files and folders are left out.

    Args:
        ignored: fields of rows and messages to leave out.

    Raises:
        ConfigError: an input does not exist, is a pipe or a device or of a kind that is not read, or is a folder that
            cannot be listed; the inputs have no file; or Parquet files need a package that is not installed.
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
            near = "" if path.exists() else near_path(path)
            raise ConfigError(f"{path} {problem}; an input is a file, a folder, or the word {STDLIB!r}.{near}")
    if not files:
        raise ConfigError(f"No files in {', '.join(map(str, inputs))}: name files of text or rows, or folders.")
    return Corpus(tuple(files), RowReader(ignored))


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
    reason = refusal(path)
    if named and reason:
        raise ConfigError(f"{path} {reason}.")
    if not reason and kind_of(path) is FileKind.PARQUET:
        require_parquet(path)
    try:
        size = path.stat().st_size
    except OSError:  # `documents` says why
        size = 0
    return SourceFile(path, size, named)


def _visible_files(root: Path) -> Iterator[Path]:
    """Yields the files below a folder, and what `documents` then skips: folders that cannot be listed, and links to
    folders or to nothing."""
    unlisted: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=unlisted.append):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (path for name in folders if (path := Path(folder, name)).is_symlink())
        yield from (path for name in names if not name.startswith(".") and not _is_special(path := Path(folder, name)))
    for error in unlisted:
        if Path(error.filename) == root:
            raise ConfigError(f"Cannot list {root}: {error.strerror}.") from error
        yield Path(error.filename)


def _is_special(path: Path) -> bool:
    """Returns whether a path is a pipe, a socket or a device."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _mixed(root: Path, paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(root))).digest())
