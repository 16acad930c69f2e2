"""`make gpu-check` and `make wheels`, as far as a machine without a GPU can test them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tk.scripts import gpu_check, gpu_parts, gpu_wheels
from tk.scripts.gpu_parts import GpuPart


def install(folder: Path, name: str, version: str) -> None:
    """Makes a distribution that `importlib.metadata` finds."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_missing_and_outdated_packages_are_found(tmp_path: Path) -> None:
    install(tmp_path / "site", "pydantic", "2.9.0")
    install(tmp_path / "machine", "pydantic", "1.10")
    install(tmp_path / "machine", "grpcio_status", "1.80.0")
    install(tmp_path / "machine", "protobuf", "5.29.0")
    wanted = [Requirement(text) for text in ("pydantic>=2", "grpcio-status>=1.72", "protobuf>=6.30", "rich")]
    lacking = gpu_check.missing(wanted, [str(tmp_path / "site"), str(tmp_path / "machine")])
    assert [r.name for r in lacking] == ["protobuf", "rich"]


def test_this_environment_lacks_nothing(project: dict[str, Any]) -> None:
    wanted = gpu_check.requirements(project["project"])
    assert {"pydantic", "grpcio-status", "pytest", "hypothesis"} <= {r.name for r in wanted}
    assert gpu_check.missing(wanted, sys.path) == []


def test_torch_is_never_taken_from_wheels(root: Path, project: dict[str, Any]) -> None:
    names = [pin.split("==")[0] for pin in gpu_wheels.pins((root / "requirements.lock").read_text())]
    assert "torch" not in names
    assert "torch" not in {r.name for r in gpu_check.requirements(project["project"])}
    assert {"pydantic", "pydantic_core", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"} <= set(names)


def test_without_cuda_it_fails_and_names_the_cause(root: Path) -> None:
    hidden = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(root / "scripts" / "gpu_check.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=hidden)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"gpu-check: torch {torch.__version__} of {sys.executable} finds no CUDA device\n"


def test_chosen_parts_run_and_write_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "cuda_problem", lambda: None)
    monkeypatch.setattr(gpu_check, "prepared", lambda: True)
    monkeypatch.setattr(gpu_check, "machine_line", lambda: "on a card")
    parts = tuple(GpuPart(name, "shows", ((module, "--version"),)) for name, module in (("a", "pip"), ("b", "nothing")))
    monkeypatch.setattr(gpu_parts, "PARTS", parts)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert gpu_check.main(["a", "--out", str(tmp_path)]) == 0
    table = (tmp_path / "gpu.md").read_text()
    assert "| a | shows | passed |" in table
    assert gpu_check.main(["b", "--out", str(tmp_path)]) == 1
    table = (tmp_path / "gpu.md").read_text()
    assert "| a | shows | passed |" in table, "the table keeps parts of earlier calls"
    assert "| b | shows | --version: exit code 1 |" in table
    assert table in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_check.main(["c", "--out", str(tmp_path)])
    assert "there is no part c: choose of a, b" in capsys.readouterr().err
