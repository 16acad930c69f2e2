"""Rows of one shape, fields beside it, and rows of several shapes."""

from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.data.row_shapes import RowReader, check_columns, holds_rows

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_a_row_without_a_shape_is_named_and_an_empty_one_is_none() -> None:
    reader = RowReader()
    assert reader.read({"text": None, "id": 3}, "x") is None
    assert reader.read({"messages": None, "text": ""}, "x") is None
    bad: list[Any] = [{}, {"id": 3}, {"txt": "a"}, [], "text", None]
    for row in bad:
        with pytest.raises(ConfigError, match=r'^x: the row .* a row has a string "text"'):
            reader.read(row, "x")


def test_columns_of_tables() -> None:
    check_columns(["id", "text"], "x")
    with pytest.raises(ConfigError, match='names "id", "txt" as columns'):
        check_columns(["id", "txt"], "x")


def test_a_text_that_holds_rows_is_seen() -> None:
    assert holds_rows('{"prompt": 1}')
    assert holds_rows('[{"text": "a"}, 1]')
    for text in ('{"a": 1}', "[]", "{", "[1]", '"text"', "[" * 100_000):
        assert not holds_rows(text)


def test_fields_to_ignore_do_not_count() -> None:
    row: dict[str, Any] = {"messages": TURNS, "text": "t", "chosen": "c"}
    assert RowReader(["messages", "chosen"]).read(row, "x") == "t"
