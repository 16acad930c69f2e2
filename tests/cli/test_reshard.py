"""`tk reshard` for people: the plan, the result, linked files, and models that tk does not know."""

import json
import re
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.cli.main import main
from tk.core.layout import Layout
from tk.core.progress import format_bytes
from tk.tests.checkpoint.saving import LLAMA, LLAMA_CONFIG, save_step


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step of two tensor-parallel ranks."""
    files = {"config.json": json.dumps(LLAMA_CONFIG).encode()}
    return save_step(tmp_path / "run", LLAMA, Layout(tp=2), side_files=files)


def test_a_dry_run_lists_the_files_that_the_command_then_writes(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new"
    words = ["reshard", str(step), str(target), "--tp", "4", "--pp", "2"]
    assert main([*words, "--dry-run"]) == 0
    read, write, *files = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"would read  [\d.]+ \w+ from {step}", read)
    assert re.fullmatch(rf"would write [\d.]+ \w+ to {target}:", write)
    assert not target.exists()
    assert main(words) == 0
    written = {path.name: path.stat().st_size for path in target.glob("*.safetensors")}
    assert sorted(files) == sorted(f"  {name}  {format_bytes(size)}" for name, size in written.items())
    out, err = capsys.readouterr()
    assert f"Next:\n  tk serve {target}\n" in err
    assert re.fullmatch(rf"{target}: [\d.]+ \w+ in {len(files)} files, .*, [\d.]+ GB/s\n", out)
    assert Checkpoint.open(target).layout == Layout(tp=4, pp=2)


def test_linked_files_are_counted(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", str(step), str(tmp_path / "one"), "--tp", "1"]) == 0
    words = ["reshard", str(tmp_path / "one"), str(tmp_path / "two"), "--tp", "1", "--link"]
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    planned = [line for line in capsys.readouterr().out.splitlines() if line.endswith(", linked")]
    assert planned
    assert main(words) == 0
    assert f"linked {len(planned)} files: checksums were copied without a check" in capsys.readouterr().out


def test_a_model_that_tk_does_not_know_can_be_copied_and_not_sharded(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    assert main(["export", str(step), str(folder), "--plain"]) == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert main(["reshard", str(folder), str(tmp_path / "one"), "--tp", "1"]) == 0
    assert set(Checkpoint.open(tmp_path / "one").tensors) == set(Checkpoint.open(step).tensors)
    assert main(["reshard", str(folder), str(tmp_path / "two"), "--tp", "2"]) == 3
    assert "model_type 'mamba' is not supported" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "two").exists()
