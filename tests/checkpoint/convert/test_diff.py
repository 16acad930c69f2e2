"""`tk diff`: the same values in any layout are the same; every kind of difference is named and measured."""

import json
from pathlib import Path

import numpy as np
import pytest

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, compare, reshard, write_part
from tk.cli.main import main
from tk.core import dtypes
from tk.core.errors import ShardCorrupt
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import TensorSpec, with_slots
from tk.scripts.broken_checkpoints import flip
from tk.tests.checkpoint.saving import MIXED, STATES, mixed_table, save_step

TABLE = mixed_table()


def write(run: Path, values: dict[str, np.ndarray], code: str = "F32") -> Checkpoint:
    table = tuple(TensorSpec(name, value.shape) for name, value in values.items())
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(1)
        entries = [(item, code, values[item.tensor].reshape(-1)) for item in owned(table, Layout(), 0)]
        write_part(folder, 0, table, entries)
        return Checkpoint.open(commit(locked, NewStep(1, with_slots(table, {"weight": code}), Layout())))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_step(tmp_path_factory.mktemp("diff") / "run", TABLE, Layout(tp=2, dp=2, zero=1, sharding="dim0"))


def test_any_layout_is_the_same(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = reshard(step, tmp_path / "tp8", layout=Layout(tp=8, pp=2))
    assert main(["diff", str(step), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is True
    assert found["num_equal"] == len(TABLE) * len(MIXED)
    assert found["differences"] == found["only_in_a"] == found["only_in_b"] == []


def test_other_dtypes_are_compared_in_fp32(step: Path, tmp_path: Path) -> None:
    """fp32 weights are the masters of the bf16 ones; a bf16 copy of the weights alone is not."""
    wide = Checkpoint.open(reshard(step, tmp_path / "fp32", layout=Layout(), dtype=dtypes.FP32))
    assert compare(Checkpoint.open(step), wide).same
    assert compare(wide, Checkpoint.open(step)).same
    narrow = Checkpoint.open(reshard(step, tmp_path / "bf16", layout=Layout(), weights_only=True))
    found = compare(wide, narrow)
    assert "0.q_proj.weight, slot exp_avg" in found.only_in_a
    assert found.only_in_b == ()
    assert {one.kind for one in found.differences} == {"values"}
    assert all(one.dtype == "fp32" and 0 < (one.max_difference or 1) < 0.02 for one in found.differences)


def test_differences_are_counted_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    base = {name: rng.standard_normal((1500, 1000), dtype=np.float32) for name in ("equal", "changed", "nan", "gone")}
    base["signed"] = np.zeros(4, np.float32)
    changed = {name: values.copy() for name, values in base.items()}
    changed["changed"][[3, 1400], [5, 999]] += np.array([0.5, -0.25], np.float32)
    changed["nan"][1499, 0] = np.nan
    changed["signed"][2] = -0.0
    changed["new"] = changed.pop("gone")[:10]
    changed["shape"], base["shape"] = np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)
    one, two = write(tmp_path / "a", base), write(tmp_path / "b", changed)
    found = compare(one, two)
    assert (found.only_in_a, found.only_in_b, found.num_equal) == (("gone",), ("new",), 1)
    by_name = {one.tensor: one for one in found.differences}
    measured = {name: (d.kind, d.num_different, d.max_difference) for name, d in by_name.items()}
    largest = float(np.abs(base["changed"].astype(np.float64) - changed["changed"]).max())
    assert measured == {
        "changed": ("values", 2, largest),
        "nan": ("values", 1, None),
        "signed": ("values", 1, 0.0),
        "shape": ("shape", 0, None),
    }
    assert largest == pytest.approx(0.5, rel=1e-3)
    assert main(["diff", str(one.path), str(two.path)]) == 1
    text = capsys.readouterr().out
    assert "changed, slot weight: 2 elements differ, by 0.5 at most" in text
    assert f"only in {two.path}: new" in text
    assert "6 differences: 1 slots of tensors are bit-equal" in text


def test_integers_are_not_compared_with_floats(tmp_path: Path) -> None:
    one = write(tmp_path / "a", {"x": np.ones(3, np.float32)})
    two = write(tmp_path / "b", {"x": np.ones(3, np.int32)}, "I32")
    assert [d.message for d in compare(one, two).differences] == ["F32 and I32 are not compared"]
    three = write(tmp_path / "c", {"x": np.array([1, 5, 1], np.int32)}, "I32")
    assert [d.max_difference for d in compare(two, three).differences] == [4.0]


def test_a_tied_head_equals_a_stored_one(tmp_path: Path) -> None:
    tied = save_step(tmp_path / "tied", TABLE, Layout(), STATES)
    untied = tuple(
        TensorSpec(s.name, s.shape, s.split, s.layer) for s in TABLE if s.name.startswith(("lm_head", "model.embed"))
    )
    found = compare(Checkpoint.open(tied), Checkpoint.open(save_step(tmp_path / "untied", untied, Layout(), STATES)))
    assert [d.tensor for d in found.differences] == ["lm_head.weight"] * len(STATES)
    assert found.num_equal == len(STATES)


def test_damage_is_no_difference(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = reshard(step, tmp_path / "other", layout=Layout())
    chunk = Checkpoint.open(other).chunks["0.o_proj.weight", "exp_avg"][0]
    flip(other / chunk.file, chunk.offset)
    with pytest.raises(ShardCorrupt, match=r"0\.o_proj\.weight"):
        compare(Checkpoint.open(step), Checkpoint.open(other))
    assert main(["diff", str(step), str(other)]) == 3
    assert "does not match its checksum" in capsys.readouterr().err
