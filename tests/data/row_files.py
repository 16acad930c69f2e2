"""Writers of the same rows in every kind of file, by libraries that are not ours."""

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow
import pyarrow.parquet

Rows = Sequence[dict[str, Any]]


def _lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _lines_of_windows(path: Path, rows: Rows) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows))


def _array(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(list(rows), indent=1, ensure_ascii=False))


def _sequence(path: Path, rows: Rows) -> None:
    path.write_text("\n".join(json.dumps(row, indent=2) for row in rows))


def _compressed(opened: Callable[..., Any]) -> Callable[[Path, Rows], None]:
    def write(path: Path, rows: Rows) -> None:
        with opened(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    return write


def _parquet(path: Path, rows: Rows) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    pyarrow.parquet.write_table(table, path, row_group_size=2)


def _table(delimiter: str) -> Callable[[Path, Rows], None]:
    def write(path: Path, rows: Rows) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)

    return write


WRITERS = MappingProxyType(
    {
        "rows.jsonl": _lines,
        "windows.ndjson": _lines_of_windows,
        "rows.json": _array,
        "sequence.json": _sequence,
        "rows.parquet": _parquet,
        "rows.csv": _table(","),
        "rows.tsv": _table("\t"),
        "rows.jsonl.gz": _compressed(gzip.open),
        "rows.json.bz2": _compressed(bz2.open),
        "rows.ndjson.xz": _compressed(lzma.open),
    }
)
TABLES = ("rows.csv", "rows.tsv")


def can_hold(name: str, rows: Rows) -> bool:
    """Returns whether a kind of file can hold these rows as they are; Parquet cannot mix types in a column."""
    values = [value for row in rows for value in row.values()]
    if name in TABLES:
        return all(isinstance(value, str) for value in values) and len({tuple(row) for row in rows}) == 1
    if name != "rows.parquet":
        return True
    try:
        for key in {key for row in rows for key in row}:
            pyarrow.array([row.get(key) for row in rows])
    except pyarrow.ArrowException:
        return False
    return all(value != {} for value in values)  # a struct without fields cannot be written


def write(folder: Path, name: str, rows: Rows) -> Path:
    """Writes rows into folder/name, in the kind of file of this name, and returns the path."""
    path = folder / name
    WRITERS[name](path, rows)
    return path
