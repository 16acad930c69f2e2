"""Committing a step: all parts or nothing, and the previous step stays the newest until then."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, write_part
from tk.checkpoint.format.chunk import Chunk, Part
from tk.checkpoint.save.seal import hugging_face_index
from tk.core.errors import CheckpointError, ManifestError, ShardMissing
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import with_slots
from tk.tests.checkpoint.faults import watched
from tk.tests.checkpoint.saving import STATES, cut, llama_table, save_step, true_values

SMALL = with_slots(llama_table(layers=1), STATES)
LAYOUT = Layout(tp=2)


def write_all(folder: Path, ranks: list[int]) -> None:
    specs = {spec.name: spec for spec in SMALL}
    for rank in ranks:
        items = owned(SMALL, LAYOUT, rank)
        entries = [(i, "F32", cut(true_values(specs[i.tensor], i.slot, "F32"), i)) for i in items]
        write_part(folder, rank, SMALL, entries)


def test_missing_parts_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(1)
        write_all(folder, [0])
        with pytest.raises(ShardMissing, match=r"1 of 2 writers have not finished: 00001\.json"):
            commit(run, NewStep(1, SMALL, LAYOUT), timeout=0)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_a_part_that_lacks_an_element_is_not_committed(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(1)
        write_all(folder, [0])
        write_part(folder, 1, SMALL, [])
        with pytest.raises(ManifestError, match="exactly once"):
            commit(run, NewStep(1, SMALL, LAYOUT))
    assert not (folder / "COMMIT").exists()


@pytest.mark.parametrize(
    ("call", "stride"), [("pwrite", 9), ("fsync", 1), ("rename", 1), ("fsync_dir", 1), ("open_new", 1)]
)
def test_a_failing_disk_leaves_the_previous_step_the_newest(tmp_path: Path, call: str, stride: int) -> None:
    """The n-th use of each call and all after it fail, for every n (or every ninth) that a save makes."""
    save_step(tmp_path / "first", SMALL, LAYOUT, STATES, step=1)
    failures = 0
    run = tmp_path / "run"
    for n in range(0, 1000, stride):
        shutil.copytree(tmp_path / "first", run)
        left = [n]

        def failing(name: str, operation: Callable[..., Any], *args: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return operation(*args)

        with watched(failing, (call,)):
            try:
                save_step(run, SMALL, LAYOUT, STATES, step=2)
                break
            except OSError:
                failures += 1
        found = Checkpoint.open(run)
        assert found.step == 1 or (found.step == 2 and (run / "step-00000002" / "COMMIT").exists())
        assert found.verify().ok
        shutil.rmtree(run)
    assert failures >= 3
    assert Checkpoint.open(run).step == 2


def test_no_step_is_committed_under_another_s_name(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(5)
        write_all(folder, [0, 1])
        with pytest.raises(
            ShardMissing, match=rf"step-00000004\.tmp-{run.attempt}: .* 2 of 2 writers have not finished"
        ):
            commit(run, NewStep(4, SMALL, LAYOUT), timeout=0)
        assert commit(run, NewStep(5, SMALL, LAYOUT)) == tmp_path / "step-00000005"
    assert (tmp_path / "LATEST").read_text() == "step-00000005\n"
    assert [step for step, _ in RunFolder(tmp_path).steps()] == [5]


def test_a_step_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(1)
        write_all(folder, [0, 1])
        (tmp_path / "step-00000001").mkdir()
        with pytest.raises(CheckpointError, match=rf"step-00000001 exists .*; {folder} holds the new step"):
            commit(run, NewStep(1, SMALL, LAYOUT))
    assert list((tmp_path / "step-00000001").iterdir()) == []


def test_an_index_is_written_where_every_weight_lies_whole() -> None:
    shapes = {"a": (4,), "b": (2,)}
    whole = [
        Chunk(name, "weight", Box.whole(shape), None, f"{name}.safetensors", 0, 8, ()) for name, shape in shapes.items()
    ]
    (index,) = hugging_face_index([Part(0, {}, tuple(whole))], shapes).values()
    assert json.loads(index) == {
        "metadata": {"total_size": 16}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"},
    }  # fmt: skip
    assert hugging_face_index([Part(0, {}, (replace(whole[0], flat=(0, 4)), whole[1]))], shapes) == {}
    state = replace(whole[0], slot="exp_avg", flat=(0, 2))
    assert hugging_face_index([Part(0, {}, (*whole, state))], shapes), "only weights count"
