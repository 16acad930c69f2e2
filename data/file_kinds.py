"""The kind of an input file, which its name says: raw text, rows of one of four formats, or neither."""

from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final


class FileKind(StrEnum):
    """How a file is read."""

    TEXT = "text"
    LINES = "lines of JSON"
    JSON = "JSON"
    PARQUET = "Parquet"
    COMMAS = "comma-separated values"
    TABS = "tab-separated values"


COMPRESSED: Final = frozenset({".gz", ".bz2", ".xz"})
_ROWS: Final = MappingProxyType(
    {
        **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".ldjson"), FileKind.LINES),
        ".json": FileKind.JSON,
        ".parquet": FileKind.PARQUET,
        ".csv": FileKind.COMMAS,
        **dict.fromkeys((".tsv", ".tab"), FileKind.TABS),
    }
)
_DECOMPRESS: Final = "is compressed in a way that tk does not read: decompress it first, or use gzip, bzip2 or xz"
_UNPACK: Final = "is an archive: unpack it and name the folder"
_CONVERT: Final = "holds a table in a format that tk does not read: write it as Parquet or as lines of JSON (.jsonl)"
_EXTRACT: Final = "is a document with a layout: write its text into a .txt file"
_WEIGHTS: Final = "holds arrays or weights, not text"
_REFUSED: Final = MappingProxyType(
    {
        **dict.fromkeys((".zst", ".zstd", ".lz4", ".br", ".lzma", ".z", ".sz"), _DECOMPRESS),
        **dict.fromkeys((".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"), _UNPACK),
        **dict.fromkeys((".arrow", ".feather", ".avro", ".orc", ".xlsx", ".xls", ".ods", ".tfrecord"), _CONVERT),
        **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb", ".h5", ".hdf5", ".mds"), _CONVERT),
        **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ppt", ".pptx"), _EXTRACT),
        **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".pkl", ".pickle", ".safetensors", ".gguf"), _WEIGHTS),
    }
)


def kind_of(path: Path) -> FileKind:
    """Returns how a file is read; a name that says nothing else is that of a text.

    `refusal` must be "" for it.
    """
    return _ROWS.get(_suffix(path), FileKind.TEXT)


def is_compressed(path: Path) -> bool:
    """Returns whether a file's name says that its content is compressed."""
    return path.suffix.lower() in COMPRESSED


def refusal(path: Path) -> str:
    """Returns why a file of this name is not read, as the end of a sentence; "" if it is."""
    if is_compressed(path) and _suffix(path) == ".parquet":
        return "is a compressed Parquet file: decompress it first, since Parquet has a compression of its own"
    return _REFUSED.get(_suffix(path), "")


def _suffix(path: Path) -> str:
    """Returns the part of a file's name that says its kind, below the one that says its compression."""
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()
