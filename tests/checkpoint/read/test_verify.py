"""Verifying: every byte that has a checksum is read, and strange files are named."""

import json
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, prepare_export
from tk.cli.main import main
from tk.core.layout import Layout
from tk.tests.checkpoint.hugging_face_values import STORED, folder_of
from tk.tests.checkpoint.saving import LLAMA, llama_table, save_step


def test_verify_and_inspect_of_a_good_one(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["verify", str(llama_step.parent)]) == 0
    assert "all as written" in capsys.readouterr().out
    assert main(["inspect", str(llama_step), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["step"], found["layout"]["tp"]) == ("tk", 1, 2)
    assert found["parameters"] == sum(v["bytes"] for v in found["tensors"].values()) // 14
    assert found["tensors"]["lm_head.weight"]["shape"] == [101, 32]
    assert main(["inspect", str(llama_step)]) == 0
    text = capsys.readouterr().out
    assert "saved at    tp 2, pp 1, dp 2, ZeRO 1" in text
    assert "q_proj\n          weight  32 x 32" in text
    (llama_step / "COMMIT").unlink()
    save_step(llama_step.parent, LLAMA, Layout(), step=0)
    assert main(["inspect", str(llama_step.parent)]) == 0
    assert "step-00000001 skipped" in caplog.text


TABLE = llama_table(layers=1)


def test_verify_sees_files_that_are_none_of_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = save_step(tmp_path / "run", TABLE, Layout(tp=2), side_files={"config.json": b"{}"})
    prepare_export(Checkpoint.open(step), tmp_path / "out").run()
    for folder, name, ok in (
        (tmp_path / "out", "README.md", True),
        (tmp_path / "out", "pytorch_model.bin", True),
        (tmp_path / "out", "parts/00001.json", True),
        (tmp_path / "out", "model.safetensors", False),
        (tmp_path / "out", "adapter_config.json", False),
        (step, "pytorch_model.bin", False),
        (step, "model.safetensors.index.json", False),
    ):
        assert Checkpoint.open(folder).verify().ok
        (folder / name).write_bytes(b"x")
        report = Checkpoint.open(folder).verify()
        assert report.ok == ok, name
        assert [problem.file for problem in report.problems] == ([] if ok else [name])
        assert any(name in note for note in report.notes) == ok
        assert main(["verify", str(folder)]) == (0 if ok else 3)
        assert f"{folder / name} is not one of this checkpoint's files" in capsys.readouterr().err.replace("\n", " ")
        (folder / name).unlink()
    plain = folder_of(tmp_path / "plain", STORED)
    (plain / "model.safetensors.index.json").write_bytes(b"{}")
    [note] = Checkpoint.open(plain).verify().notes
    assert "model.safetensors is read instead" in note
