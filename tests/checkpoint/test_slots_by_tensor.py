"""Tensors of one step with different slots: saved by four ranks, cut anew, compared, verified and read back."""

import json
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, compare, reshard
from tk.cli.main import main
from tk.core import ownership
from tk.core.dtypes import FP32
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import TensorSpec, with_slots
from tk.tests.checkpoint.saving import MIXED, assert_equal, cut, mixed_table, save_table, true_values

MATRIX = {"weight": "BF16", "master": "F32", "momentum": "BF16"}
NORM = {"weight": "BF16", "master": "F32", "exp_avg": "F32"}


def slots_of(spec: TensorSpec) -> dict[str, str]:
    """Matrices of layers have one moment, vectors have another, the ends of the model have both of Adam's."""
    if not isinstance(spec.layer, int):
        return MIXED
    return MATRIX if len(spec.shape) > 1 else NORM


TABLE = tuple(with_slots([spec], slots_of(spec))[0] for spec in mixed_table())
TRUTH = {(s.name, slot): true_values(s, slot, code) for s in TABLE if not s.alias for slot, code in s.slots.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "MIN_CUT_SIZE", 512)  # deals small tensors by flat ranges too, as large ones are
        return Checkpoint.open(save_table(tmp_path_factory.mktemp("slots") / "run", TABLE, Layout(tp=2, dp=2, zero=2)))


def assert_holds_all_once(found: Checkpoint) -> None:
    """Each slot of each tensor is there with its bits, and no tensor has a slot of another's."""
    assert found.verify().ok
    found.check()
    assert set(found.chunks) == set(TRUTH)
    for (name, slot), values in TRUTH.items():
        assert_equal(found.read(name, slot=slot).numpy(), values)


def test_a_step_has_each_tensors_own_slots(saved: Checkpoint) -> None:
    assert_holds_all_once(saved)
    for spec in TABLE:
        if not spec.alias:
            assert saved.manifest.tensors[spec.name].slots == slots_of(spec)
    assert saved.tensors["3.scale"].slots == NORM


@pytest.mark.parametrize("target", [Layout(), Layout(tp=4, pp=2)], ids=["tp1", "tp4-pp2"])
def test_a_reshard_keeps_them_and_invents_none(saved: Checkpoint, target: Layout, tmp_path: Path) -> None:
    found = Checkpoint.open(reshard(saved.path, tmp_path / "new", layout=target))
    assert found.layout == target
    assert_holds_all_once(found)
    assert compare(saved, found).same


def test_a_cast_to_fp32_drops_the_masters_of_all(saved: Checkpoint, tmp_path: Path) -> None:
    found = Checkpoint.open(reshard(saved.path, tmp_path / "new", layout=Layout(tp=2), dtype=FP32))
    wanted = {(name, slot): values for (name, slot), values in TRUTH.items() if slot not in ("weight", "master")}
    wanted |= {(name, "weight"): values for (name, slot), values in TRUTH.items() if slot == "master"}
    assert set(found.chunks) == set(wanted)
    for (name, slot), values in wanted.items():
        assert_equal(found.read(name, slot=slot).numpy(), values)


def test_ranks_of_other_layouts_read_their_shares(saved: Checkpoint) -> None:
    for layout in (Layout(dp=3, zero=3, bucket_size=1000), Layout(tp=4, dp=2, zero=1, sharding="dim0")):
        for item in {item for rank in range(layout.world_size) for item in owned(TABLE, layout, rank)}:
            values = saved.read(item.tensor, item.box, item.slot, item.flat).numpy()
            assert_equal(values.reshape(-1), cut(TRUTH[item.tensor, item.slot], item))


def test_inspect_and_verify_show_them(saved: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(saved.path)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(saved.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {name: tensor["slots"] for name, tensor in shown["tensors"].items()} == {
        spec.name: slots_of(spec) for spec in TABLE if not spec.alias
    }
    sizes = shown["slot_bytes"]
    assert set(sizes) == {*MATRIX, *NORM, *MIXED}
    assert sizes == {slot: sum(v.nbytes for (_, of), v in TRUTH.items() if of == slot) for slot in sizes}
