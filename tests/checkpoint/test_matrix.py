"""Any layout to any layout, bit for bit: the reads of every rank, and the files of a reshard."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from tk.checkpoint import Checkpoint, reshard
from tk.core import ownership
from tk.core.casts import Array
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import Split, TensorSpec, with_slots
from tk.tests.checkpoint.saving import MIXED, STATES, assert_equal, cut, mixed_table, save_step, true_values
from tk.tests.example_counts import sized

LAYOUTS = [
    *(Layout(tp=tp) for tp in (1, 2, 4, 8)),
    Layout(tp=1, dp=2, zero=1),
    Layout(tp=1, dp=4, zero=2, bucket_size=2000),
    Layout(tp=1, dp=4, zero=3, bucket_size=5000),
    Layout(tp=1, pp=2, dp=2, zero=1, virtual_stages=2),
    Layout(tp=1, pp=4, dp=2, zero=3),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=4, zero=1, shard_size=2),
    Layout(tp=2, dp=3, zero=3),
    Layout(tp=2, pp=2, dp=2, zero=2, bucket_size=2000),
    Layout(tp=2, pp=2, dp=4, zero=1, shard_size=2, virtual_stages=2),
    Layout(tp=2, pp=4, dp=1),
    Layout(tp=4, dp=2, zero=1),
    Layout(tp=4, dp=4, zero=2),
    Layout(tp=4, pp=2, dp=2, zero=3),
    Layout(tp=4, pp=4),
    Layout(tp=8, dp=2, zero=1),
    Layout(tp=8, pp=2),
    Layout(tp=8, dp=4, zero=3),
    Layout(tp=1, dp=4, zero=1, sharding="dim0"),
    Layout(tp=1, dp=2, zero=3, sharding="dim0"),
    Layout(tp=2, dp=4, zero=2, sharding="dim0"),
    Layout(tp=2, pp=2, dp=4, zero=3, shard_size=2, sharding="dim0"),
    Layout(tp=4, pp=4, dp=2, zero=3, sharding="dim0"),
    Layout(tp=8, pp=2, dp=2, zero=1, sharding="dim0"),
    Layout(cp=2, ep=2, zero=1),
    Layout(tp=2, dp=2, cp=2, zero=2, shard_size=2, bucket_size=2000),
    Layout(tp=1, pp=2, dp=2, cp=2, ep=2, zero=3, bucket_size=2000),
    Layout(tp=4, dp=2, ep=2, zero=1, shard_size=1),
    Layout(tp=2, dp=4, ep=2, expert_tp=2, zero=2, bucket_size=2000),
    Layout(tp=4, pp=2, expert_tp=1, zero=3, sharding="dim0"),
    Layout(tp=2, dp=2, zero=2, bucket_size=2000, layer_buckets=True),
]
Saved: TypeAlias = Callable[[Layout], Checkpoint]
ENDS = ("model.embed_tokens.weight", "0.norm.weight", "1.gate.weight", "2.c_attn.weight", "3.scale", "lm_head.weight")


def label(layout: Layout) -> str:
    """A test's name."""
    words = f"tp{layout.tp}pp{layout.pp}x{layout.virtual_stages}dp{layout.dp}z{layout.zero}{layout.sharding}"
    more = {"of": layout.shard_size, "cp": layout.cp - 1, "ep": layout.ep - 1, "etp": layout.expert_tp}
    return words + "".join(f"{key}{getattr(layout, key, size)}" for key, size in more.items() if size)


# The layouts that `make test` reads from: every size of tp and pp, ZeRO stage and sharding is there, and cp with ep.
# One third of all layouts reads from each of them.
CHOSEN = [LAYOUTS[index] for index in (5, 13, 18, 19, 25, 28)]


def sources(layouts: list[Layout]) -> pytest.MarkDecorator:
    """A test's argument `source`: these layouts, of which `make test` has those that are chosen."""
    marks = [() if layout in CHOSEN else pytest.mark.matrix for layout in layouts]
    cases = [pytest.param(layout, marks=mark) for layout, mark in zip(layouts, marks, strict=True)]
    return pytest.mark.parametrize("source", cases, ids=map(label, layouts))


@pytest.fixture(scope="module")
def tensors() -> tuple[TensorSpec, ...]:
    return with_slots(mixed_table(), MIXED)


@pytest.fixture(scope="module")
def truth(tensors: tuple[TensorSpec, ...]) -> dict[tuple[str, str], Array]:
    return {(s.name, slot): true_values(s, slot, code) for s in tensors if not s.alias for slot, code in MIXED.items()}


@pytest.fixture(scope="module", autouse=True)
def cut_small_tensors() -> object:
    """Deal small tensors by flat ranges too, as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "MIN_CUT_SIZE", 512)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tensors: tuple[TensorSpec, ...]) -> Saved:
    folder = tmp_path_factory.mktemp("matrix")
    return cache(lambda layout: Checkpoint.open(save_step(folder / label(layout), tensors, layout)))


@pytest.mark.every(2)
@sources(LAYOUTS)
def test_every_rank_of_every_layout_reads_its_own_from_every_other(
    source: Layout,
    saved: Saved,
    tensors: tuple[TensorSpec, ...],
    truth: dict[tuple[str, str], Array],
) -> None:
    checkpoint = saved(source)
    assert checkpoint.layout == source
    seen: set[object] = set()
    every = sized(1, 3)
    for target in LAYOUTS[CHOSEN.index(source) % every if every > 1 else 0 :: every]:
        for rank in range(target.world_size):
            for item in owned(tensors, target, rank):
                if item in seen:
                    continue
                seen.add(item)
                found = checkpoint.read(item.tensor, item.box, item.slot, item.flat).numpy()
                assert_equal(found.reshape(-1), cut(truth[item.tensor, item.slot], item))
    assert len(seen) > len(truth)


@pytest.mark.every(2)
@sources([LAYOUTS[index] for index in (5, 8, 12, 13, 19, 21, 25, 28, 30)])
@pytest.mark.parametrize("target", [Layout(), Layout(tp=2), Layout(tp=8, pp=2)], ids=label)
def test_reshard(
    source: Layout,
    target: Layout,
    saved: Saved,
    tensors: tuple[TensorSpec, ...],
    truth: dict[tuple[str, str], Array],
    tmp_path: Path,
) -> None:
    found = Checkpoint.open(reshard(saved(source).path, tmp_path / "new", layout=target))
    assert found.verify().ok
    assert found.layout == target
    for (name, slot), values in truth.items():
        assert_equal(found.read(name, slot=slot).numpy(), values)
    wanted = {
        (item.tensor, item.slot, item.box, item.flat)
        for rank in range(target.world_size)
        for item in owned(tensors, target, rank)
    }
    stored = {(c.tensor, c.slot, c.box, c.flat) for chunks in found.chunks.values() for c in chunks}
    assert stored == wanted


def test_a_tied_name_reads_its_original(saved: Saved, truth: dict[tuple[str, str], Array]) -> None:
    for source in CHOSEN:
        assert_equal(saved(source).read("lm_head.weight").numpy(), truth["model.embed_tokens.weight", "weight"])


@sources([layout for layout in LAYOUTS if layout.virtual_stages == 1])
def test_an_untied_head_and_fp32_weights(tmp_path: Path, source: Layout) -> None:
    table = with_slots([spec for spec in mixed_table(tied=False) if spec.name in ENDS], STATES)
    truth = {(spec.name, slot): true_values(spec, slot, code) for spec in table for slot, code in STATES.items()}
    layouts = [layout for layout in LAYOUTS if layout.virtual_stages == 1]
    wanted = {item for layout in layouts for rank in range(layout.world_size) for item in owned(table, layout, rank)}
    found = Checkpoint.open(save_step(tmp_path, table, source, STATES))
    assert all("master" not in tensor.slots for tensor in found.tensors.values())
    for item in wanted:
        values = found.read(item.tensor, item.box, item.slot, item.flat).numpy()
        assert_equal(values.reshape(-1), cut(truth[item.tensor, item.slot], item))


def test_fused_columns_of_a_transposed_tensor(tmp_path: Path) -> None:
    """A tensor of three column boxes per rank, with a scalar and a 3-D one beside it, whichever way they were cut."""
    table = (
        TensorSpec("attn", (12, 24), Split(1, 4, sections=3), 0),
        TensorSpec("attn.bias", (24,), Split(0, 4, sections=3), 0),
        TensorSpec("conv", (3, 8, 5), Split(1), 0),
        TensorSpec("scale", (), None, "last"),
    )
    saved = save_step(tmp_path / "run", table, Layout(tp=2, dp=3, zero=1), STATES)
    columns = [(chunk.box.bounds()[1], chunk.flat) for chunk in Checkpoint.open(saved).chunks["attn", "weight"]]
    assert sorted(columns) == [([low, low + 4], None) for low in range(0, 24, 4)]
    for tp in (1, 2):
        found = Checkpoint.open(reshard(saved, tmp_path / f"tp{tp}", layout=Layout(tp=tp)))
        for spec in table:
            assert_equal(found.read(spec.name, slot="exp_avg").numpy(), true_values(spec, "exp_avg", "F32"))


def test_torch_sees_the_same_values(saved: Saved, truth: dict[tuple[str, str], Array]) -> None:
    import torch

    name = "0.o_proj.weight"
    found = saved(LAYOUTS[-1]).read(name).torch()
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.view(torch.int16).numpy().view(np.uint16), truth[name, "weight"])
    assert saved(LAYOUTS[-1]).read(name, slot="exp_avg").torch().dtype == torch.float32
