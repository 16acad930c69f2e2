"""The four commands, as a user meets them: output, exit codes, nothing half-written, no torch."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.files import disk_facts, folders, storage
from tk.cli.main import main
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import MIXED, llama_table, save_step

TABLE = llama_table(layers=2, tied=False)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return save_step(
        tmp_path / "run", TABLE, Layout(tp=2, dp=2, zero=1), side_files={"config.json": json.dumps(CONFIG).encode()}
    )


def test_reshard_shows_its_plan_then_does_it(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["reshard", str(step.parent), str(tmp_path / "new"), "--tp", "4", "--json"]
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


def test_reshard_of_a_hugging_face_folder(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(step), str(tmp_path / "hf"), "--plain"]) == 0
    assert main(["reshard", str(tmp_path / "hf"), str(tmp_path / "tp4"), "--tp", "4", "--dtype", "fp32"]) == 0
    assert "GB/s" in capsys.readouterr().out
    found = Checkpoint.open(tmp_path / "tp4")
    assert found.tensors["model.norm.weight"].slots == {"weight": "F32"}
    assert found.config()["dtype"] == "float32"
    for name in Checkpoint.open(tmp_path / "hf").tensors:
        assert found.read(name).torch().equal(Checkpoint.open(step).read(name).torch().float())


def test_a_target_that_is_taken(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken, other = tmp_path / "taken", tmp_path / "other"
    args = ["reshard", str(step), str(taken), "--tp", "1"]
    assert main(args) == 0
    first = Checkpoint.open(taken).manifest_sha256
    assert main(args) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*args, "--force", "--weights-only"]) == 0
    assert Checkpoint.open(taken).manifest_sha256 != first
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for target in (other, step, step.parent):
        assert main(["reshard", str(step), str(target), "--tp", "1", "--force"]) == 2
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
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    assert main(["reshard", str(step), str(tmp_path / "new"), *args]) == code
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_target_without_room(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_facts, "free_bytes", lambda folder: 2048)
    assert main(["reshard", str(step), str(tmp_path / "new"), "--tp", "1"]) == 1
    assert "2 KiB are free there" in " ".join(capsys.readouterr().err.split())
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_few_files_are_open_at_once(step: Path, tmp_path: Path) -> None:
    """32 files are written where a process may have 24 open."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    command = [sys.executable, "-m", "tk", "reshard", str(step), str(tmp_path / "new"), "--tp", "4", "--pp", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == 32
    assert Checkpoint.open(tmp_path / "new").verify().ok


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK], ids=errno.errorcode.get)
def test_links_that_cannot_be_are_refused_before_the_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    source = save_step(tmp_path / "run", TABLE, Layout())
    monkeypatch.setattr(folders, "link", refuse)
    monkeypatch.setattr(storage, "open_new", lambda path: pytest.fail(f"{path} is written"))
    for command in (["reshard", "--tp", "1", "--dtype", "fp16"], ["export"]):
        assert main([*command, str(source), str(tmp_path / "new"), "--link"]) == 2
        assert "leave out --link" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run"]


def _odd_name(folder: Path) -> None:
    (folder / "my notes.txt").write_text("")


def _dangling(folder: Path) -> None:
    (folder / "vocab.txt").symlink_to("nowhere")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "vocab.txt")


def _folder(folder: Path) -> None:
    (folder / "vocab.json").mkdir()


def _too_large(folder: Path) -> None:
    (folder / "vocab.txt").touch()
    os.truncate(folder / "vocab.txt", 2**29)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_odd_name, "'my notes.txt' is not a plain file name, so it is refused. Rename it"),
        (_dangling, "nowhere"),
        (_pipe, "not a regular file"),
        (_folder, "not a regular file"),
        (_too_large, "at most"),
    ],
)
def test_side_files_that_cannot_be_taken_along_are_refused_before_the_copy(
    step: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    assert main(["export", str(step), str(tmp_path / "hf"), "--plain"]) == 0
    spoil(tmp_path / "hf")
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new"), "--dry-run"]) == 3
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


def test_side_files_are_counted_streamed_and_checked(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(step), str(tmp_path / "hf"), "--plain"]) == 0
    data = os.urandom(5 * 2**20)
    (tmp_path / "hf" / "vocab.txt").write_bytes(data)
    (tmp_path / "hf" / ".hidden.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(disk_facts, "free_bytes", lambda folder: 5 * 2**20)
        assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 1
    assert "5 MiB are free there" in " ".join(capsys.readouterr().err.split())
    pread, most = storage.pread, [0]

    def watched(fd: int, buffer: memoryview, offset: int, once: bool = False) -> int:
        most.append(len(buffer))
        return pread(fd, buffer, offset, once)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "pread", watched)
        assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    assert max(most) <= 2**20
    assert (tmp_path / "new" / "vocab.txt").read_bytes() == data
    assert not (tmp_path / "new" / ".hidden.json").exists()
    assert Checkpoint.open(tmp_path / "new").verify().ok
    (tmp_path / "new" / "vocab.txt").write_bytes(data[::-1])
    assert main(["reshard", str(tmp_path / "new"), str(tmp_path / "newer"), "--tp", "1"]) == 3
    assert "vocab.txt is not the file that was saved" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "new", "run"]


def test_a_file_that_cannot_be_written_is_named(step: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    command = [sys.executable, "-m", "tk", "reshard", str(step), str(tmp_path / "new"), "--tp", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limit)
    assert done.returncode == 1
    name = rf"{tmp_path}/new\.tk-target-\w+/[\w-]+\.safetensors"
    assert re.search(rf"error: {name} cannot be written: File too large \(EFBIG\)\.\n", done.stderr)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_missing_or_damaged_source(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["verify"], ["export", "DST"], ["reshard", "DST", "--tp", "1"]):
        words = [command[0], str(tmp_path / "nowhere"), *(w.replace("DST", str(tmp_path / "x")) for w in command[1:])]
        assert main(words) == 3
        assert "nowhere does not exist" in capsys.readouterr().err
    shard = step / "model-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["verify", str(step)]) == 3
    assert shard.name in capsys.readouterr().err
    assert main(["verify", str(step), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [(p["file"], p["slot"], p["block"]) for p in report["problems"]] == [(shard.name, "weight", 0)]
    assert report["problems"][0]["tensor"] in {spec.name for spec in TABLE}
    assert main(["export", str(step), str(tmp_path / "x")]) == 3
    assert shard.name in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_verify_and_inspect_of_a_good_one(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["verify", str(step.parent)]) == 0
    assert "are as written" in capsys.readouterr().out
    assert main(["inspect", str(step), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["step"], found["layout"]["tp"]) == ("tk", 1, 2)
    assert found["parameters"] == sum(v["bytes"] for v in found["tensors"].values()) // 14
    assert found["tensors"]["lm_head.weight"]["shape"] == [101, 32]
    assert main(["inspect", str(step)]) == 0
    text = capsys.readouterr().out
    assert "saved at    tp 2, pp 1, dp 2, ZeRO 1" in text
    assert "q_proj\n          weight  32 x 32" in text
    (step / "COMMIT").unlink()
    save_step(step.parent, TABLE, Layout(), step=0)
    assert main(["inspect", str(step.parent)]) == 0
    assert "step-00000001 skipped" in caplog.text


def test_export_by_links(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(step), str(tmp_path / "out"), "--link"]) == 2
    assert "leave out --link" in capsys.readouterr().err
    assert main(["reshard", str(step), str(tmp_path / "tp1"), "--tp", "1"]) == 0
    assert main(["export", str(tmp_path / "tp1"), str(tmp_path / "out"), "--link"]) == 0
    assert "copied without a check" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "tp1"), str(tmp_path / "out2"), "--link", "--plain"]) == 2


def test_reshard_links_what_does_not_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights kept and its optimizer states left out: every file that is left is one of the source's."""
    source = save_step(tmp_path / "run", TABLE, Layout(tp=2))
    plain = ["reshard", str(source), "--tp", "2", "--weights-only"]
    assert main([*plain[:2], str(tmp_path / "copy"), *plain[2:]]) == 0
    assert main([*plain[:2], str(tmp_path / "link"), *plain[2:], "--link"]) == 0
    assert "2 files were linked, their checksums copied without a check" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "link").glob("*.safetensors"))
    assert names == ["model-00000.safetensors", "model-00001.safetensors"]
    assert all((tmp_path / "link" / name).samefile(source / name) for name in names)
    assert main(["diff", str(tmp_path / "copy"), str(tmp_path / "link")]) == 0
    assert main(["verify", str(tmp_path / "link")]) == 0
    flipped = tmp_path / "link" / names[1]
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    assert main(["verify", str(tmp_path / "link")]) != 0, "the checksums are those of the source"


def test_reshard_copies_what_changes_and_links_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --dtype the weights are new, the states are not; at another tp nothing is as it was."""
    source = save_step(tmp_path / "run", TABLE, Layout(tp=2), side_files={"config.json": json.dumps(CONFIG).encode()})
    assert main(["reshard", str(source), str(tmp_path / "cast"), "--tp", "2", "--dtype", "fp16", "--link"]) == 0
    found = Checkpoint.open(tmp_path / "cast")
    assert found.verify().ok
    linked = {path.name for path in (tmp_path / "cast").glob("*.safetensors") if path.stat().st_nlink > 1}
    assert linked == {path.name for path in source.glob("optim-*")}
    old = Checkpoint.open(source)
    for name, slot in found.chunks:
        if slot != "weight":
            assert found.read(name, slot=slot).values.tobytes() == old.read(name, slot=slot).values.tobytes()
    assert main(["reshard", str(source), str(tmp_path / "one"), "--tp", "1", "--link"]) == 0
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "one").glob("*.safetensors"))
    assert main(["export", str(source), str(tmp_path / "plain"), "--plain"]) == 0
    capsys.readouterr()
    assert main(["reshard", str(tmp_path / "plain"), str(tmp_path / "two"), "--tp", "1", "--link"]) == 2
    assert "no checksums to carry over; leave out --link" in capsys.readouterr().err


def test_no_torch_is_loaded(step: Path, tmp_path: Path) -> None:
    commands = [
        ["reshard", str(step), str(tmp_path / "a"), "--tp", "1"],
        ["export", str(step), str(tmp_path / "b"), "--plain"],
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
