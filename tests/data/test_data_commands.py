"""`tk tokenizer train` and `tk data prepare`: from text files to a token folder, and refusals in one paragraph."""

from pathlib import Path

import pytest

from tk.cli.main import main
from tk.train.data.token_file import TokenFile


@pytest.fixture
def text(tmp_path: Path, documents: list[str]) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number, document in enumerate(documents[:5]):
        (folder / f"{number}.txt").write_text(document)
    (folder / "noise.bin").write_bytes(b"\xff\xff")
    return folder


def test_text_to_tokens(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, tokens = tmp_path / "tokenizer", tmp_path / "tokens"
    assert main(["tokenizer", "train", str(text), "--vocab-size", "400", "--out", str(tokenizer)]) == 0
    assert "400 tokens" in capsys.readouterr().out
    assert main(["data", "prepare", str(text), "--tokenizer", str(tokenizer), "--out", str(tokens)]) == 0
    said = capsys.readouterr()
    assert f"{TokenFile(tokens).meta.num_tokens:,} tokens of 5 documents" in said.out
    assert "skipped 1 files" in said.err
    assert "tokenizing" in said.err

    again = ["data", "prepare", str(text / "0.txt"), "--tokenizer", str(tokenizer), "--out", str(tokens)]
    assert main(again) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    assert TokenFile(tokens).meta.num_documents == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tokenizer", "train", "TEXT", "--vocab-size", "100", "--out", "NEW"], 2, "257"),
        (["tokenizer", "train", "MISSING", "--vocab-size", "300", "--out", "NEW"], 2, "no file or folder"),
        (["tokenizer", "train", "TEXT", "--vocab-size", "300", "--out", "TEXT", "--force"], 2, "left as it is"),
        (["tokenizer", "train", "--vocab-size", "300", "--out", "NEW"], 2, "INPUT"),
        (["data", "prepare", "TEXT", "--tokenizer", "MISSING", "--out", "NEW"], 3, "tokenizer.json"),
        (["data", "prepare", "TEXT", "--tokenizer", "MISSING", "--out", "TEXT"], 2, "exists already"),
    ],
)
def test_refusals(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    places = {"TEXT": str(text), "MISSING": str(tmp_path / "missing"), "NEW": str(tmp_path / "new")}
    assert main([places.get(word, word) for word in words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
