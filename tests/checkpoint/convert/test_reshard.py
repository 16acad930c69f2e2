"""The four commands, as a user meets them: output, exit codes, nothing half-written, no torch."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.files import disk_facts
from tk.cli.main import main
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import LLAMA, MIXED
from tk.tests.limited import limited


def test_reshard_shows_its_plan_then_does_it(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["reshard", str(llama_step.parent), str(tmp_path / "new"), "--tp", "4", "--json"]
    assert main([*args, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert sorted(os.listdir(tmp_path)) == ["run"]
    assert main(args) == 0
    done = json.loads(capsys.readouterr().out)
    assert done.pop("seconds") > 0
    assert done == planned
    assert planned["files"] == {path.name: path.stat().st_size for path in (tmp_path / "new").glob("*.safetensors")}
    assert sum(planned["files"].values()) == planned["bytes_written"]
    assert Checkpoint.open(tmp_path / "new").layout == Layout(tp=4)
    assert set(Checkpoint.open(tmp_path / "new").tensors["model.norm.weight"].slots) == set(MIXED)


def test_reshard_of_a_hugging_face_folder(llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    assert main(["reshard", str(tmp_path / "hf"), str(tmp_path / "tp4"), "--tp", "4", "--dtype", "fp32"]) == 0
    assert "GB/s" in capsys.readouterr().out
    found = Checkpoint.open(tmp_path / "tp4")
    assert found.tensors["model.norm.weight"].slots == {"weight": "F32"}
    assert found.config()["dtype"] == "float32"
    for name in Checkpoint.open(tmp_path / "hf").tensors:
        assert found.read(name).torch().equal(Checkpoint.open(llama_step).read(name).torch().float())


def test_a_target_that_is_taken(llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken, other = tmp_path / "taken", tmp_path / "other"
    args = ["reshard", str(llama_step), str(taken), "--tp", "1"]
    assert main(args) == 0
    first = Checkpoint.open(taken).manifest_sha256
    assert main(args) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*args, "--force", "--weights-only"]) == 0
    assert Checkpoint.open(taken).manifest_sha256 != first
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for target in (other, llama_step, llama_step.parent):
        assert main(["reshard", str(llama_step), str(target), "--tp", "1", "--force"]) == 2
    assert sorted(os.listdir(tmp_path)) == ["other", "run", "taken"]
    assert os.listdir(other) == ["thesis.txt"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--tp", "3"], 2, "tp = 3 does not fit"),
        (["--tp", "2", "--pp", "5"], 2, "num_hidden_layers = 2"),
        (["--tp", "0"], 2, "0 is not in the range"),
        (["--tp", "1", "--dtype", "int8"], 2, "'int8' is not one of"),
    ],
)
def test_reshard_that_cannot_be(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    assert main(["reshard", str(llama_step), str(tmp_path / "new"), *args]) == code
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_target_without_room(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_facts, "free_bytes", lambda folder: 2048)
    assert main(["reshard", str(llama_step), str(tmp_path / "new"), "--tp", "1"]) == 1
    assert "2 KiB are free there" in " ".join(capsys.readouterr().err.split())
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_file_that_cannot_be_written_is_named(llama_step: Path, tmp_path: Path) -> None:
    command = limited(resource.RLIMIT_FSIZE, 30_000, "reshard", str(llama_step), str(tmp_path / "new"), "--tp", "1")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    name = rf"{tmp_path}/new\.tk-target-\w+/[\w-]+\.safetensors"
    assert re.search(rf"error: {name} cannot be written: File too large \(EFBIG\)\.\n", done.stderr)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_missing_or_damaged_source(llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["verify"], ["export", "DST"], ["reshard", "DST", "--tp", "1"]):
        words = [command[0], str(tmp_path / "nowhere"), *(w.replace("DST", str(tmp_path / "x")) for w in command[1:])]
        assert main(words) == 3
        assert "nowhere does not exist" in capsys.readouterr().err
    shard = llama_step / "model-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["verify", str(llama_step)]) == 3
    assert shard.name in capsys.readouterr().err
    assert main(["verify", str(llama_step), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [(p["file"], p["slot"], p["block"]) for p in report["problems"]] == [(shard.name, "weight", 0)]
    assert report["problems"][0]["tensor"] in {spec.name for spec in LLAMA}
    assert main(["export", str(llama_step), str(tmp_path / "x")]) == 3
    assert shard.name in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_no_torch_is_loaded(llama_step: Path, tmp_path: Path) -> None:
    commands = [
        ["reshard", str(llama_step), str(tmp_path / "a"), "--tp", "1"],
        ["export", str(llama_step), str(tmp_path / "b"), "--plain"],
        ["reshard", str(tmp_path / "b"), str(tmp_path / "c"), "--tp", "2"],
        ["verify", str(tmp_path / "a")],
        ["inspect", str(tmp_path / "b")],
    ]
    code = (
        "import json, sys; from tk.cli.main import main\n"
        "codes = [main(command) for command in json.loads(sys.argv[1])]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
