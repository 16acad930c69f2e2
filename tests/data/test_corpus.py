"""Files of every kind as documents: the same rows, whichever file holds them, and files that are refused by name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tk.core.errors import ConfigError
from tk.data import parquet_rows
from tk.data.examples import Chat, PromptResponse
from tk.data.sources import find_corpus
from tk.tests.data.row_files import TABLES, WRITERS, write

ROWS = [{"prompt": f'q "{i}", é\n', "response": f"a\t{i}☃"} for i in range(5)]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_holds_the_same_rows(tmp_path: Path, name: str) -> None:
    corpus = find_corpus([write(tmp_path, name, ROWS)])
    read: list[int] = []
    documents = list(corpus.documents(read.append))
    assert documents == [PromptResponse(row["prompt"], row["response"]) for row in ROWS]
    assert sum(read) == corpus.num_bytes
    assert (corpus.counts.rows, corpus.counts.empty) == (5, 0)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", *TABLES])
def test_a_wrong_row_of_every_kind_of_file_is_named(tmp_path: Path, name: str) -> None:
    rows = [row | {"tools": ""} for row in ROWS]
    rows[3]["tools"] = "[]x"
    path = write(tmp_path, name, rows)
    where = f"{path}:4: " if name == "rows.jsonl" else f"{path}: row 4: "
    with pytest.raises(ConfigError) as refusal:
        list(find_corpus([path]).documents())
    assert str(refusal.value).startswith(f'{where}"tools" goes through a chat template')


@pytest.mark.parametrize(
    "name",
    ["a.zst", "a.jsonl.zst", "a.zip", "a.tar.gz", "a.tgz", "a.arrow", "a.xlsx", "a.pdf", "a.npz", "a.Parquet.gz"],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / name
    path.write_text("text")
    with pytest.raises(ConfigError, match=name):
        find_corpus([path])
    (tmp_path / "folder" / "b.txt").write_text("text")
    corpus = find_corpus([tmp_path / "folder"])
    assert list(corpus.documents()) == ["text"]
    assert [each.path.name for each in corpus.skipped] == [name]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"a,b\n1,2\n", 'names "a", "b" as columns'),
        ("a.csv", b"prompt;response\n1;2\n", "as columns"),
        ("a.csv", b"text,text\n1,2\n", "two columns have the same name"),
        ("a.csv", b"text,id\nx,1\ny\n", "row 2 (it ends in line 3) has 1 cells"),
        ("a.csv", b'text,id\n"x,1\n', "row 1 (line 2) cannot be read: unexpected end"),
        ("a.csv", b"text,id\nx\xff,1\n", "is not UTF-8 text"),
        ("a.tsv", b"text\tchosen\nx\ty\n", 'row 1: "chosen" is preference data'),
        ("a.parquet", b"PAR1", "as Parquet"),
        ("a.jsonl.gz", b"no gzip", "Cannot read"),
        ("a.txt.xz", b"no xz", "Cannot read"),
        ("a.json.gz", gzip.compress(b'[{"text": "x"}]', mtime=0)[:-9], "Cannot read"),
        ("a.json", b'{"data": [1]}', 'row 1: the row has "data", but a row has'),
        ("a.json", b'["text"]', "row 1: the row must be an object"),
        ("a.txt", b"a\0b", "is not text: it has characters of code 0"),
        ("a.txt", b'[{"text": "x"}]', "holds rows of JSON"),
        ("a.bak", b'[\n {"text": "x"},\n {"text": "y"}\n]', "holds rows of JSON"),
        ("a", b'{"messages": []}\n{}', "holds rows of JSON"),
        ("a.md", "text".encode("utf-16"), "is UTF-16"),
    ],
)
def test_a_damaged_or_unknown_file_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        list(find_corpus([path]).documents())
    assert str(path) in str(refusal.value)
    assert said in str(refusal.value)


def test_texts_are_decompressed_and_json_in_a_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é\r\n".encode()))
    (tmp_path / "b.txt").write_text('{"no": "row"}\n')
    (tmp_path / "c.md").write_text("{")
    paths = sorted(tmp_path.iterdir())
    assert list(find_corpus(paths).documents()) == ["é\r\n", '{"no": "row"}\n', "{"]


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.csv", [{"text": "x" * 500_000}])
    assert list(find_corpus([path]).documents()) == ["x" * 500_000]


def test_parquet_without_its_package_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "rows.parquet", [{"text": "x"}])
    monkeypatch.setattr(parquet_rows, "find_spec", {}.get)
    for item in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"rows\.parquet: .* pip install 'pyarrow>=20'.*\.jsonl"):
            find_corpus([item])


def test_nulls_of_parquet_are_absent_fields(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g", "arguments": {"y": 2}}}]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}], "text": None},
        {"messages": None, "text": "t"},
    ]
    kinds = ("rows.parquet", "rows.jsonl", "rows.json")
    first, *others = (list(find_corpus([write(tmp_path, kind, rows)]).documents()) for kind in kinds)
    assert [first[1], *(each[1] for each in others)] == ["t"] * 3
    found = [each[0].messages for each in (first, *others) if isinstance(each[0], Chat)]
    assert found[0] == found[1] == found[2]
    assert json.dumps(found[0][1]) == json.dumps({"role": "assistant", "tool_calls": calls})


def test_the_first_conversation_without_a_token_to_learn_is_named_whatever_file_follows(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "q"}]
    both = [*user, {"role": "assistant", "content": "a"}]
    first = write(tmp_path, "rows.jsonl", [{"messages": both}, {"messages": user}])
    second = write(tmp_path, "rows.json", [{"messages": both}, {"messages": user}])
    third = write(tmp_path, "rows.ndjson.xz", [{"text": "x"}])
    corpus = find_corpus([first, second, third])
    for document in corpus.documents():
        if isinstance(document, Chat) and len(document.messages) == 1:
            corpus.leave_out(document)
    assert corpus.counts.unlearned == 2
    assert corpus.counts.why == f'{first}:2: no message has the role "assistant" (roles: user)'


@pytest.mark.parametrize(
    "other",
    [
        pyarrow.StructArray.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["x", "x"]),
        pyarrow.array([2**52], pyarrow.timestamp("ms")),
        pyarrow.array([2**30], pyarrow.date32()),
    ],
)
def test_values_of_parquet_that_python_does_not_have_are_an_error_with_the_file(tmp_path: Path, other: Any) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"], "meta": other}), path)
    with pytest.raises(ConfigError, match=r"Cannot read .*rows\.parquet after row 0 as Parquet: "):
        list(find_corpus([path]).documents())


@pytest.mark.parametrize(("name", "content"), [("package.json", '{"name": "x"}'), ("a.csv", "a,b\n"), ("b.json", "{")])
def test_a_file_of_a_folder_that_may_be_no_data_can_be_left_out(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=rf"{name}.* move it out of the folder, or name the files"):
        list(find_corpus([tmp_path]).documents())
    with pytest.raises(ConfigError, match=rf"{name}(?!.* move it)"):
        list(find_corpus([tmp_path / name]).documents())
