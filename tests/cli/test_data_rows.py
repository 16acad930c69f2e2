"""`tk data prepare` of rows: what it leaves out and counts, and a file in which nothing is learned."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tk.cli.main import main
from tk.data.token_file import TokenFile

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def prepare(byte_level_folder: Path, tmp_path: Path) -> Any:
    """Runs the command on inputs, and returns its exit code."""
    shutil.copytree(byte_level_folder, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)

    def run(*words: str | Path) -> int:
        places = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
        return main(["data", "prepare", *map(str, words), *places])

    return run


def test_what_is_left_out_is_counted(prepare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    rows = [CHAT, ASKED, {"text": ""}, {"messages": None}, {"text": "t", "stars": 3}, {**CHAT, "id": 7}]
    path.write_text(json.dumps(rows))
    assert prepare(path) == 0
    said = capsys.readouterr().err
    assert "left out 2 empty rows of 6" in said
    assert (
        f'left out 1 row of 6 with no token to learn, the first: {path}: row 2: no message has the role "assi' in said
    )
    assert "fields without effect: stars (in 1 row), id (in 1 row)" in said
    assert TokenFile(tmp_path / "out").meta.num_documents == 3

    assert prepare(path, "--force", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    tokens = TokenFile(tmp_path / "out")
    learned = int(tokens.learned(0, tokens.num_tokens).sum())
    assert (document["documents"], document["tokens"], document["learned_tokens"]) == (3, tokens.num_tokens, learned)
    assert (document["rows"], document["empty_rows"], document["unlearned_rows"]) == (6, 2, 1)
    assert document["fields_without_effect"] == {"stars": 1, "id": 1}
    assert document["skipped_files"] == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": ""}, "2 are empty"),
        (ASKED, r'no message has the role "assistant" (roles: user)'),
        ({"messages": [{"role": "assistant", "content": "b", "weight": 0}]}, "has the weight 0"),
    ],
)
def test_a_file_in_which_nothing_is_learned_is_an_error(
    prepare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], why: str
) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps(CHAT))
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert prepare(tmp_path / "good.jsonl", bad) == 2
    said = capsys.readouterr().err
    assert f"{bad}: there is nothing to learn in any of its 2 rows" in said
    assert why in said
    assert not (tmp_path / "out").exists()


def test_a_field_is_refused_or_left_out_on_request(
    prepare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**CHAT, "prompt": "a", "train_me": False}))
    assert prepare(path) == 2
    assert (
        f'{path}:1: the row has several shapes at once, by its fields "prompt", "messages"' in capsys.readouterr().err
    )
    assert prepare(path, "--ignore", "prompt") == 2
    assert f'{path}:1: "train_me" is no field that tk knows the meaning of' in capsys.readouterr().err
    assert prepare(path, "--ignore", "prompt", "--ignore", "train_me") == 0
    capsys.readouterr()


def test_files_that_hold_neither_text_nor_rows_are_named(
    prepare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.arrow").write_text("ARROW1")
    (folder / "c.dat").write_bytes(b"a\0b")
    (folder / "d.txt").write_text(json.dumps(CHAT) + "\n")
    (folder / "e.csv").write_text("text\n")
    assert prepare(folder, "--json") == 0
    skipped = {Path(each["path"]).name: each["reason"] for each in json.loads(capsys.readouterr().out)["skipped_files"]}
    assert set(skipped) == {"b.arrow", "c.dat", "d.txt", "e.csv"}
    assert "holds a table in a format that tk does not read" in skipped["b.arrow"]
    assert "let it end in .jsonl" in skipped["d.txt"]
    assert "has no rows" in skipped["e.csv"]
    for name in skipped:
        assert prepare(folder / name, "--force") == 2
        assert ("no text" if name == "e.csv" else name) in capsys.readouterr().err
