"""Rows of JSON: read in pieces of any size as `json` reads the whole, and damaged files are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import ConfigError
from tk.data import json_rows
from tk.data.json_rows import json_lines, json_values
from tk.tests.example_counts import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def ignore(_num_bytes: int) -> None:
    pass


@examples(90)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), max_size=5),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 0, 2]),
    is_array=st.booleans(),
    ascii_only=st.booleans(),
)
def test_pieces_of_any_size_give_the_same_rows(
    rows: list[dict[str, Any]],
    chunk: int,
    indent: int | None,
    is_array: bool,
    ascii_only: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    texts = [json.dumps(row, indent=indent, ensure_ascii=ascii_only) for row in rows]
    path = tmp_path_factory.getbasetemp() / "pieces.json"
    path.write_text(" [" + " ,\n".join(texts) + "]\n" if is_array else "\n ".join(texts), encoding="utf-8")
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK", chunk)
        found = list(json_values(path, read.append))
    assert [row.value for row in found] == rows
    assert [row.where for row in found] == [f"{path}: row {number}" for number in range(1, len(rows) + 1)]
    assert sum(read) == path.stat().st_size


def test_an_array_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_text(json.dumps([{"text": "x" * 1000} for _ in range(5000)]))
    read: list[int] = []
    assert next(json_values(path, read.append)).value == {"text": "x" * 1000}
    assert sum(read) < path.stat().st_size / 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1}', 'after row 1 the array of rows must go on with "," or end'),
        ('[{"a": 1} {"a": 2}]', "after row 1 the array"),
        ('[{"a": 1},]', "row 2: the row is not valid JSON: Expecting value"),
        ('[{"a": 1}] x', "something follows"),
        ("[", "row 1: the row is not valid JSON: Expecting value at character 1 of the row"),
        ('[{"a": 1}, {"a": x}]', "row 2: the row is not valid JSON: Expecting value at character 7 of the row"),
        ('[{"a": "never ends}]', "row 1: the row is not valid JSON: Unterminated string"),
        ('[{"a": 1}, {"a": NaN}]', "row 2: the row is not valid JSON: it holds NaN"),
        ('{"a": 1, "a": 2}', "row 1: the row is not valid JSON: an object has the key 'a' twice"),
        ('{"a": {"b": 1, "b": 1}}', "has the key 'b' twice"),
        ('{"a": "\\ud800"}', "row 1: the row has text that is not valid Unicode"),
        ("[" * 100_000, "row 1: the row is not valid JSON"),
        ('{"a": 1} nonsense', "row 2: the row is not valid JSON"),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        list(json_values(path, ignore))
    assert str(refusal.value).startswith(str(path))
    assert said in str(refusal.value)


def test_encodings_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9\xe2\x80\xa8"}\r\n\r\n  \n{"a": "\\ud83d\\ude00"}')
    assert [(row.where, row.value) for row in json_lines(path, ignore)] == [
        (f"{path}:1", {"a": "é\u2028"}),
        (f"{path}:4", {"a": "😀"}),
    ]
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"lines\.jsonl:2: the line is not UTF-8 text"):
        list(json_lines(path, ignore))
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        path.write_bytes("\ufeff".encode(encoding) * (encoding == "utf-16-le") + '{"a": 1}\n'.encode(encoding))
        for read in (json_lines, json_values):
            with pytest.raises(ConfigError, match=r"lines\.jsonl is UTF-16 or UTF-32 text"):
                list(read(path, ignore))
