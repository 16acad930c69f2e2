"""`tk eval` on a tiny model: the kinds of data, the table of dtypes, JSON, and errors."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tk.cli.main import main
from tk.text.tokenizer import Tokenizer

TEXTS = ("the other one is there\n" * 12, "abc on the error\n" * 9)


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> str:
    return str(model_folder("grouped"))


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "held out.txt"
    path.write_text(TEXTS[0])
    return str(path)


def results(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json", "--threads", "1"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_text_file_json_lines_and_a_token_folder(
    folder: str,
    text_file: str,
    reference: Callable[[str], LlamaForCausalLM],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    losses = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            losses.append((float(reference("grouped")(ids, labels=ids).loss), ids.shape[1] - 1))
    document = results(capsys, folder, "--data", text_file, "--kernels", "aten")
    [found] = document["results"]
    assert found["loss"] == pytest.approx(losses[0][0], abs=1e-4)
    assert (document["num_tokens"], document["num_windows"], document["context"]) == (losses[0][1], 1, 640)
    assert (found["dtype"], found["kv_dtype"], found["model"]["kernels"]) == ("fp32", "fp32", "aten")

    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    document = results(capsys, folder, "--data", str(lines))
    mean = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    assert document["results"][0]["loss"] == pytest.approx(mean, abs=1e-4)

    table = tmp_path / "texts.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "chosen"), *((text, "no") for text in ("", *TEXTS))])
    assert results(capsys, folder, "--data", str(table), "--ignore", "chosen")["num_tokens"] == document["num_tokens"]
    assert main(["eval", folder, "--data", str(table), "--ignore", "chosen", "--threads", "1"]) == 0
    assert "left out 1 empty row of 3\n" in capsys.readouterr().err
    assert main(["eval", folder, "--data", str(table)]) == 2
    assert 'row 1: "chosen" is preference data' in capsys.readouterr().err

    prepared = tmp_path / "prepared"
    assert main(["data", "prepare", str(lines), "--tokenizer", folder, "--out", str(prepared)]) == 0
    capsys.readouterr()
    document = results(capsys, folder, "--data", str(prepared))
    assert document["num_tokens"] == sum(count + 1 for _, count in losses)  # the end of each text counts too


def test_a_table_compares_dtypes(folder: str, text_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-dtype", "auto", "--kv-dtype", "int8", "--context", "64", "--stride", "32", "--limit", "100"]
    assert main(["eval", folder, "--data", text_file, "--threads", "1", *options]) == 0
    captured = capsys.readouterr()
    head, data, _, columns, base, int8 = captured.out.splitlines()
    assert "llama" in head
    assert data.endswith("99 tokens in 3 windows of up to 64, stride 32")
    assert columns.split("  ")[0] == "dtype"
    assert base.split()[:3] == ["fp32", "fp32", "fp32"]
    assert int8.split()[:3] == ["fp32", "fp32", "int8"]
    assert int8.split()[5][0] in "+-"
    assert "of 99 (" in int8
    assert "fp32, KV cache int8, tokens scored: 99 of 99" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--data", "no-such.txt"], 2, "no-such.txt does not exist"),
        (["--data", "{folder}"], 2, "is not a token folder"),
        (["--data", "{text}", "--context", "641"], 2, "--context 641 is more than the 640 positions"),
        (["--data", "{text}", "--context", "8", "--stride", "9"], 2, "--stride 9 is more than the context"),
        (["--data", "{text}", "--threads", "0"], 2, "--threads"),
        (["--data", "{text}", "--tp", "3"], 2, "tp"),
        ([], 2, "--data"),
    ],
)
def test_errors_are_one_paragraph(
    folder: str, text_file: str, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    filled = [argument.format(folder=folder, text=text_file) for argument in arguments]
    assert main(["eval", folder, *filled]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_text_needs_the_tokenizer_and_tokens_need_the_same(
    folder: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared, bare, other = tmp_path / "prepared", tmp_path / "bare", tmp_path / "other"
    assert main(["data", "prepare", text_file, "--tokenizer", folder, "--out", str(prepared)]) == 0
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    assert main(["eval", str(bare), "--data", text_file]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    shutil.copytree(folder, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    assert main(["eval", str(other), "--data", str(prepared)]) == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_fine_tuning_examples_are_sent_to_prepare(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n')
    assert main(["eval", folder, "--data", str(path)]) == 2
    assert "tk data prepare" in capsys.readouterr().err
