"""`tk tokenizer train` and `tk data prepare`: from text files to a token folder; refusals are one paragraph."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tk.cli.main import main
from tk.data.token_file import TokenFile

UNIGNORED = """
import signal, sys
signal.signal(int(sys.argv[1]), signal.SIG_DFL)  # nohup would ignore it
from tk.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


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
    said = capsys.readouterr()
    assert "400 tokens" in said.out
    assert f"Next:\n  tk data prepare {text} --tokenizer {tokenizer} --out tokens\n" in said.err
    assert main(["data", "prepare", str(text), "--tokenizer", str(tokenizer), "--out", str(tokens)]) == 0
    said = capsys.readouterr()
    assert f"{TokenFile(tokens).meta.num_tokens:,} tokens of 5 documents" in said.out
    assert "skipped 1 file without text or rows" in said.err
    assert "tokenizing" in said.err
    assert (
        f"""Next:
  tk train CONFIG.toml --set 'data.sources=[{{path = "{tokens}"}}]'\n"""
        in said.err
    )

    again = ["data", "prepare", str(text / "0.txt"), "--tokenizer", str(tokenizer), "--out", str(tokens)]
    assert main(again) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    assert TokenFile(tokens).meta.num_documents == 1
    capsys.readouterr()


def test_results_in_json_have_the_same_values(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, tokens = tmp_path / "tokenizer", tmp_path / "tokens"
    words = ["tokenizer", "train", str(text), "--vocab-size", "300", "--out", str(tokenizer), "--json"]
    assert main(["--log-format", "json", *words]) == 0
    said = capsys.readouterr()
    trained = json.loads(said.out)
    assert (trained["out"], trained["tokens"]) == (str(tokenizer), 300)
    (skipped,) = trained["skipped_files"]
    assert skipped["path"] == str(text / "noise.bin")
    lines = [json.loads(line)["message"] for line in said.err.splitlines()]
    assert lines[-1].startswith("training the tokenizer: "), "progress is JSON, and no command comes next"
    assert (
        main(["-q", "data", "prepare", str(text), "--tokenizer", str(tokenizer), "--out", str(tokens), "--json"]) == 0
    )
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == TokenFile(tokens).meta.num_tokens
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tokenizer", "train", "TEXT", "--vocab-size", "100", "--out", "NEW"], 2, "257"),
        (["tokenizer", "train", "MISSING", "--vocab-size", "300", "--out", "NEW"], 2, "does not exist"),
        (
            ["tokenizer", "train", "TEXT", "--vocab-size", "300", "--out", "TEXT", "--force"],
            2,
            "was not replaced: it holds",
        ),
        (["tokenizer", "train", "--vocab-size", "300", "--out", "NEW"], 2, "INPUT"),
        (["tokenizer", "train", "TEXT", "--vocab-size", "99999999999", "--out", "NEW"], 2, "1048576 or fewer"),
        (["tokenizer", "train", "EMPTY", "--vocab-size", "300", "--out", "NEW"], 2, "no text"),
        (["tokenizer", "train", "TEXT", "--vocab-size", "300", "--out", "EMPTY/x/y"], 2, "empty.txt is a file"),
        (["tokenizer", "train", "PIPE", "--vocab-size", "300", "--out", "NEW"], 2, "neither a regular file nor a"),
        (["data", "prepare", "TEXT", "--tokenizer", "MISSING", "--out", "EMPTY/x/y"], 2, "empty.txt is a file"),
        (["data", "prepare", "TEXT", "--tokenizer", "MISSING", "--out", "NEW"], 3, "tokenizer.json"),
        (["data", "prepare", "TEXT", "--tokenizer", "MISSING", "--out", "TEXT"], 2, "exists already"),
    ],
)
def test_refusals(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    (text / "empty.txt").touch()
    os.mkfifo(text / "pipe")
    places = {"TEXT": text, "MISSING": tmp_path / "missing", "NEW": tmp_path / "new"}
    places |= {"EMPTY": text / "empty.txt", "EMPTY/x/y": text / "empty.txt" / "x" / "y", "PIPE": text / "pipe"}
    assert main([str(places.get(word, word)) for word in words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(byte_level_folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = ["data", "prepare", "stdlib", "--tokenizer", str(byte_level_folder), "--out", str(tmp_path / "tokens")]
    command = [sys.executable, "-c", UNIGNORED, str(int(number)), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (1, "")
    assert list(tmp_path.iterdir()) == []
