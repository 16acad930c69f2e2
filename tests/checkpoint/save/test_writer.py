"""One rank's files: how they are laid out, and which values are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tk.checkpoint import Checkpoint, NewStep, Options, RunFolder, commit, prepare_reshard, reshard, write_part
from tk.checkpoint.files import folders
from tk.checkpoint.format import manifest
from tk.checkpoint.format.chunk import Part
from tk.checkpoint.save import writer
from tk.checkpoint.save.writer import plan_files, put_part
from tk.core.errors import CheckpointError, ManifestError
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.ownership import Owned, owned
from tk.core.tensors import TensorSpec, with_slots
from tk.tests.checkpoint.hugging_face_values import assert_same, exported, folder_of
from tk.tests.checkpoint.saving import STATES, assert_equal, cut, llama_table, save_step, true_values

SMALL = with_slots(llama_table(layers=1), STATES)


@pytest.mark.parametrize(
    "values",
    [np.zeros(31, np.float32), np.zeros((32, 1), np.float32), np.zeros(32, np.float64), np.zeros(64, np.float32)[::2]],
)
def test_values_of_another_shape_or_dtype_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    spec = TensorSpec("model.norm.weight", (32,))
    item = Owned(spec.name, "weight", Box.whole(spec.shape))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight, slot weight: got values"):
        write_part(tmp_path, 0, (spec,), [(item, "F32", values)])
    assert not list((tmp_path / "parts").iterdir())


def test_a_step_may_be_committed_as_soon_as_its_last_part_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, in another process, can be that quick: the last writer has no more to do in the folder then."""
    rename = folders.rename

    def and_commit(source: Path, target: Path) -> None:
        rename(source, target)
        if target.parent.name == "parts":
            monkeypatch.setattr(folders, "rename", rename)
            commit(run, NewStep(1, weights, Layout()))

    monkeypatch.setattr(folders, "rename", and_commit)
    specs = {spec.name: spec for spec in SMALL}
    weights = with_slots(SMALL, {"weight": "F32"})
    items = owned(weights, Layout(), 0)
    with RunFolder(tmp_path).lock() as run:
        entries = [(item, "F32", cut(true_values(specs[item.tensor], item.slot, "F32"), item)) for item in items]
        write_part(run.begin_step(1), 0, SMALL, entries)
    assert Checkpoint.open(tmp_path).verify().ok


def test_a_writer_begins_a_new_file_when_one_is_full(tmp_path: Path) -> None:
    specs = {spec.name: spec for spec in SMALL}
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(1)
        entries = [
            (item, "F32", lambda item=item: cut(true_values(specs[item.tensor], item.slot, "F32"), item))
            for item in owned(SMALL, Layout(), 0)
        ]
        part = write_part(folder, 0, SMALL, entries, max_file=10_000)
        commit(run, NewStep(1, SMALL, Layout()))
    assert sum(name.startswith("model-00000") for name in part.files) > 2
    found = Checkpoint.open(tmp_path)
    assert found.verify().ok
    for spec in SMALL[:-1]:
        assert_equal(found.read(spec.name).numpy(), true_values(spec, "weight", "F32"))


def test_more_chunks_than_a_reader_accepts_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"layers.{number}.weight": torch.full((1,), float(number)) for number in range(400)}
    source = Checkpoint.open(folder_of(tmp_path / "source", many))
    for module, name, limit, message in (
        (writer, "MAX_PART", 2**15, r"chunk table of \d+ bytes would not be read: at most 32768 are accepted"),
        (manifest, "MAX_MANIFEST", 2**15, "manifest of 400 tensors"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, limit)
            with pytest.raises(CheckpointError, match=message):
                prepare_reshard(source, tmp_path / "x", Options(Layout()))
    with monkeypatch.context() as patch:
        patch.setattr(writer, "MAX_PART", 2**15)
        with pytest.raises(CheckpointError, match="would not be read"):
            save_step(tmp_path / "run", tuple(TensorSpec(name, (1,)) for name in many), Layout())
        assert not list((tmp_path / "run").rglob("*.safetensors"))
    monkeypatch.setattr(writer, "MAX_ENTRIES", 150)
    reshard(source.path, tmp_path / "x", layout=Layout())
    assert len(list((tmp_path / "x").glob("*.safetensors"))) == 3
    assert_same(exported(tmp_path / "x"), many)


def test_two_of_one_name_in_a_file_are_refused(tmp_path: Path) -> None:
    table = (TensorSpec("a", (4, 2), SMALL[0].split), TensorSpec("a@weight#0", (2,)))
    with pytest.raises(ManifestError, match="'a@weight#0' in one safetensors file"):
        save_step(tmp_path / "run", table, Layout(tp=2), {"weight": "F32"})


def test_files_are_named_by_slot_and_writer_and_wide_values_come_first() -> None:
    a, b = Owned("a", "weight", Box.whole((4,))), Owned("b", "weight", Box.whole((2,)))
    half = Owned("a", "exp_avg", Box.whole((4,)), (2, 4))
    entries = [(a, "BF16"), (b, "F32"), (half, "F32")]
    weights, states = plan_files(7, entries, {"a": (4,), "b": (2,)})
    assert (weights.name, states.name) == ("model-00007.safetensors", "optim-exp_avg-00007.safetensors")
    assert [entry.owned.tensor for entry in weights.entries] == ["b", "a"]
    assert [entry.begin for entry in weights.entries] == [4096, 4096 + 8]
    assert b'"a@exp_avg#0"' in states.header, "a run of a tensor does not bear the tensor's name"
    assert weights.size == 4096 + 16


def test_a_part_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    put_part(tmp_path, Part(3))
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["00003.json"]
    assert Part.parse((tmp_path / "parts" / "00003.json").read_bytes(), "the part") == Part(3)
