"""Rows of Parquet files, for which the extra `parquet` is needed."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..core.errors import ConfigError
from ..core.extras import install_line
from .source_bytes import Advance, RawRow

_ROWS_AT_ONCE: Final = 256


def require_parquet(path: Path) -> None:
    """Raises ConfigError if Parquet files cannot be read on this machine."""
    if find_spec("pyarrow") is None:
        raise ConfigError(
            f"{path}: Parquet files need the extra `parquet`: {install_line('parquet')}. Or write the rows as lines of "
            "JSON, in a file whose name ends in .jsonl."
        )


def parquet_rows(path: Path, advance: Advance) -> Iterator[RawRow]:
    """Yields the rows. A null in a nested value is an absent field: Parquet gives all values of a column all fields.

    Raises:
        ConfigError: the file cannot be read or is damaged, two of its columns have one name, a value is none that
            Python has (a date after the year 9999), or the extra is missing.
    """
    require_parquet(path)
    import pyarrow
    import pyarrow.parquet

    number = reported = 0
    try:
        size = path.stat().st_size
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ConfigError(f"{path}: two columns have the same name, among {', '.join(names)}.")
            for batch in file.iter_batches(_ROWS_AT_ONCE, use_threads=False):
                for value in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield RawRow(f"{path}: row {number}", {name: _present(each) for name, each in value.items()})
                advance(size * number // file.metadata.num_rows - reported)
                reported = size * number // file.metadata.num_rows
    except (OSError, ValueError, OverflowError, KeyError, pyarrow.ArrowException) as error:
        raise ConfigError(f"Cannot read {path} after row {number} as Parquet: {error}.") from error
    advance(size - reported)


def _present(value: Any) -> Any:
    """Returns a value without the fields of its objects that are null."""
    if isinstance(value, dict):
        return {key: _present(each) for key, each in value.items() if each is not None}
    return [_present(each) for each in value] if isinstance(value, list) else value
