"""Rows of tables of text: comma- and tab-separated values, whose first line names the columns."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..core.errors import ConfigError
from .row_shapes import check_columns
from .source_bytes import Advance, RawRow, source_bytes

_LONGEST_CELL: Final = 2**31 - 1  # characters


def table_rows(path: Path, advance: Advance, delimiter: str) -> Iterator[RawRow]:
    """Yields the rows below the header, each as an object of strings.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8, its columns are not those of rows that tk knows, or a row
            has more or fewer cells.
    """
    csv.field_size_limit(_LONGEST_CELL)
    with source_bytes(path, advance) as file:
        text = io.TextIOWrapper(file.stream, encoding="utf-8-sig", newline="")
        table = csv.reader(text, delimiter=delimiter, strict=True)
        number = 0
        try:
            columns = next(table, [])
            if columns:
                check_columns(columns, str(path))
            for number, cells in enumerate(table, start=1):
                file.report()
                if not cells:
                    continue
                where = f"{path}: row {number}"
                if len(cells) != len(columns):
                    raise ConfigError(
                        f"{where} (it ends in line {table.line_num}) has {len(cells)} cells, but the header has "
                        f"{len(columns)} columns."
                    )
                yield RawRow(where, dict(zip(columns, cells, strict=True)))
        except csv.Error as error:
            raise ConfigError(f"{path}: row {number + 1} (line {table.line_num}) cannot be read: {error}.") from error
