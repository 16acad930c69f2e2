"""A step's name and its manifest agree, or the step is refused by name and nothing moves."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder, export_links, prepare_export, reshard
from tk.checkpoint.format.step_names import attempt_of, is_misnamed, new_attempt, step_of
from tk.core.errors import CheckpointError, ConfigError
from tk.core.layout import Layout
from tk.tests.checkpoint.crashing import assert_is_step, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 3."""
    save(tmp_path / "run", range(1, 4), keep=0)
    return tmp_path / "run"


def test_names() -> None:
    assert [step_of(name) for name in ("step-00000000", "step-00000012", "step-123456789")] == [0, 12, 123456789]
    for name in ("step-12", "step-000000012", "step-00000012.bad-1", "xstep-00000012", "step-0000001٢", "LATEST"):
        assert step_of(name) is None, name
    assert [name for name in ("step-12", "step-000000012", "step-00000012", "step-x") if is_misnamed(name)] == [
        "step-12",
        "step-000000012",
    ]
    assert attempt_of("step-00000012.tmp-0a1b2c3d") == attempt_of("LATEST.trash-0a1b2c3d") == "0a1b2c3d"
    assert attempt_of("step-00000012.bad-0a1b2c3d") is None
    assert [attempt_of("record.tmp-0a1b2c3d", files) for files in ((), ["record"])] == [None, "0a1b2c3d"]


def test_every_attempt_is_told_from_a_users_word_or_date() -> None:
    for number in range(300):
        attempt = new_attempt()
        assert attempt_of(f"step-00000001.tmp-{attempt}") == attempt, number
    for word in ("notes", "20261124", "0a1b", "0a1b2c3d4", "0A1B2C3D", "0a1b2c3d-mine", "0a1b2c3g", ""):
        assert attempt_of(f"step-00000001.tmp-{word}") is None, word


@pytest.mark.parametrize("name", ["step-00000009", "step-000000002", "step-2", "step-00000000"])
def test_a_copied_step_is_refused_and_nothing_moves(run: Path, name: str) -> None:
    shutil.copytree(run / "step-00000002", run / name)
    if name == "step-00000000":  # older than the newest, so only a direct read refuses it
        assert Checkpoint.open(run).step == 3
    else:
        with pytest.raises(CheckpointError, match=f"{name} .*holds .*step.*move it out of the run|{name} is named as"):
            Checkpoint.open(run)
    if len(name) == len("step-00000009"):
        with pytest.raises(CheckpointError, match=rf"{name} is named as step \d and holds step 2\. .*step-00000002"):
            Checkpoint.open(run / name)
    names = sorted(os.listdir(run))
    with RunFolder(run).lock() as locked:
        if name == "step-00000009":
            with pytest.raises(CheckpointError, match="holds step 2"):
                locked.begin_step(9)
        locked.prune(keep=3)
    assert sorted(os.listdir(run)) == names
    for step in (1, 2, 3):
        assert_is_step(run / f"step-0000000{step}", step)


def test_a_stranger_s_folder_of_a_like_name_is_left_alone(run: Path) -> None:
    (run / "step-5").mkdir()
    (run / "step-7").write_text("")
    assert Checkpoint.open(run).step == 3
    (run / "step-00000009").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"step-00000009 is not a folder"):
        Checkpoint.open(run)


def test_a_run_whose_only_step_was_renamed_is_not_taken_for_an_empty_one(run: Path) -> None:
    shutil.rmtree(run / "step-00000001")
    shutil.rmtree(run / "step-00000002")
    (run / "step-00000003").rename(run / "step-3")
    with pytest.raises(CheckpointError, match=r"step-3 holds a step and is not named as a run names one"):
        Checkpoint.open(run)


def test_a_step_of_a_newer_tk_is_refused_and_not_passed_over(run: Path) -> None:
    manifest = run / "step-00000003" / "manifest.json"
    data = json.dumps(json.loads(manifest.read_text()) | {"version": 4}).encode()
    manifest.write_bytes(data)
    (run / "step-00000003" / "COMMIT").write_text(hashlib.sha256(data).hexdigest() + "\n")
    with pytest.raises(
        CheckpointError, match=r"version 4; this tk reads 'tk', versions 1 to 3\. Read it with the tk that wrote it"
    ):
        Checkpoint.open(run)
    with RunFolder(run).lock() as locked, pytest.raises(CheckpointError, match="version 4"):
        locked.begin_step(3)
    assert (run / "step-00000003").exists()


@pytest.mark.parametrize(
    "name", ["step-00000007", "step-000000002", "step-00000002.tmp-0a1b2c3d", "LATEST.tmp-0a1b2c3d"]
)
def test_no_copy_gets_a_name_that_a_run_would_take_for_something_else(run: Path, name: str) -> None:
    names = sorted(os.listdir(run))
    with pytest.raises(ConfigError, match="choose another name"):
        reshard(run / "step-00000002", run / name, layout=Layout())
    whole = reshard(run / "step-00000002", run.parent / "whole", layout=Layout())
    with pytest.raises(ConfigError, match="choose another name"):
        export_links(Checkpoint.open(whole), run / name)
    for plain in (False, True):
        with pytest.raises(ConfigError, match="choose another name"):
            prepare_export(Checkpoint.open(run), run / name, plain=plain)
    with pytest.raises(ConfigError, match=r"step-00000003 has the name of a step and would hold no step of a run"):
        prepare_export(Checkpoint.open(run), run.parent / "step-00000003", plain=True)
    assert sorted(os.listdir(run)) == names
    assert Checkpoint.open(reshard(run / "step-00000002", run.parent / "step-00000002", layout=Layout())).step == 2
