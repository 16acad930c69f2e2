"""Snapshots: all ranks together save every element of every slot once, and a checkpoint is read back by slot."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import CheckpointError, ShapeMismatch
from tk.core.layout import Layout
from tk.core.tensors import TensorSpec, with_slots
from tk.tests.call_count import count_calls
from tk.tests.checkpoint.saving import MIXED, cut, save_step, save_table, true_values
from tk.tests.train.zero import small_buffers
from tk.tests.train.zero.small_buffers import NUM_ELEMENTS, TABLE, make_buffers, make_module
from tk.train.config.sections import OffloadSection, OptimizerSection
from tk.train.saving.snapshot import Snapshot
from tk.train.zero.sharded_adamw import ShardedAdamW
from tk.train.zero.states.open_states import StatePlaces


def make_snapshot(
    zero: int,
    size: int = 1,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    table: tuple[TensorSpec, ...] = TABLE,
    module: torch.nn.Module | None = None,
    states: Literal["fp32", "bf16"] = "fp32",
) -> Snapshot:
    """Returns one rank's snapshot; its exp_avg is the weight plus 1."""
    options = OptimizerSection(states=states)
    module = module or make_module()
    buffers = make_buffers(module, zero, size=size, rank=rank, dtype=dtype, table=table, options=options)
    optimizer = ShardedAdamW(buffers, options)
    for (_, master), (_, values) in zip(optimizer.runs("master"), optimizer.runs("exp_avg"), strict=True):
        values.copy_(master + 1)
    return Snapshot(optimizer)


@pytest.mark.parametrize(("zero", "size"), [(0, 1), (0, 3), (1, 2), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_all_ranks_together_save_each_element_of_each_slot_once(zero: int, size: int) -> None:
    whole = {name: parameter.detach().flatten() for name, parameter in make_module().named_parameters()}
    added = {"weight": 0.0, "exp_avg": 1.0}
    counted = dict.fromkeys(added, 0)
    for rank in range(size):
        snapshot = make_snapshot(zero, size, rank)
        for item in snapshot.owned(rank):
            if item.slot in added:
                values = torch.from_numpy(snapshot.values(item))
                start, stop = item.flat or (0, item.box.size)
                assert torch.equal(values, whole[item.tensor][start:stop] + added[item.slot])
                counted[item.slot] += len(values)
    assert counted == dict.fromkeys(added, NUM_ELEMENTS)


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_in_bf16_are_rounded_masters_and_travel_as_uint16(zero: int) -> None:
    snapshot = make_snapshot(zero, dtype=torch.bfloat16)
    slots = {"weight": "BF16", "exp_avg": "F32", "exp_avg_sq": "F32", "master": "F32"}
    assert all(spec.slots == slots for spec in snapshot.table)
    for _, master in snapshot.optimizer.runs("master"):
        master += 2**-20  # which bf16 cannot hold
    whole = dict(make_module().named_parameters())
    for item in snapshot.owned(0):
        expected = whole[item.tensor].detach().flatten()
        values = snapshot.values(item)
        copied = np.empty_like(values)
        snapshot.copy(item, copied)
        assert np.array_equal(copied, values)
        if item.slot == "weight":
            assert values.dtype == np.uint16
            assert values.tolist() == expected.bfloat16().view(torch.uint16).tolist()
        elif item.slot == "master":
            assert torch.equal(torch.from_numpy(values), expected.bfloat16().float() + 2**-20)


@pytest.mark.parametrize("tier", ["none", "disk"])
@pytest.mark.parametrize("zero", [1, 3])
def test_each_tensor_is_loaded_and_saved_in_its_own_slots(
    zero: int, tier: Literal["none", "disk"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices have a momentum in bf16, biases have both of Adam's moments; they are in buckets of two families."""
    muon, adam = {"weight": "BF16", "momentum": "BF16", "master": "F32"}, MIXED
    table = tuple(with_slots([spec], muon if len(spec.shape) > 1 else adam)[0] for spec in TABLE)
    monkeypatch.setattr(small_buffers, "with_run_slots", lambda *_: table)
    checkpoint = Checkpoint.open(save_table(tmp_path / "run", table, Layout(dp=3, zero=3)))
    counted: Counter[tuple[str, str]] = Counter()
    for rank in range(2):
        buffers = make_buffers(make_module(), zero, size=2, rank=rank, dtype=torch.bfloat16)
        places = StatePlaces(torch.device("cpu"), OffloadSection(optimizer=tier), tmp_path)
        optimizer = ShardedAdamW(buffers, OptimizerSection(), places)
        snapshot = Snapshot(optimizer)
        snapshot.load(checkpoint)
        for item in snapshot.owned(rank):
            if item.slot != "weight":
                stored = true_values(
                    next(s for s in TABLE if s.name == item.tensor), item.slot, MIXED.get(item.slot, "BF16")
                )
                assert np.array_equal(snapshot.values(item), cut(stored, item))
                counted[item.tensor, item.slot] += len(snapshot.values(item))
        optimizer.close()
    wanted = {(spec.name, slot): math.prod(spec.shape) for spec in table for slot in spec.states}
    assert counted == wanted


def test_an_fp32_run_saves_no_masters_beside_its_weights() -> None:
    expected = {"weight": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
    assert all(spec.slots == expected for spec in make_snapshot(1).table)


def test_ranks_hold_whole_weights_below_stage_3_and_buffers_at_stage_3() -> None:
    table = (replace(TABLE[0], trainable=False, buffer=True, dtype="F32"), *TABLE[1:])
    module = make_module()
    module.get_parameter("0.weight").requires_grad_(False)
    held = {piece.tensor.name: values for piece, values in make_snapshot(3, table=table, module=module).weights.items()}
    assert list(held) == ["0.weight"]
    assert torch.equal(held["0.weight"], make_module().get_parameter("0.weight").flatten())
    assert {piece.tensor.name for piece in make_snapshot(2, 2).weights} == {spec.name for spec in TABLE}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_frozen_weights_are_saved_once_and_read_at_another_layout(tmp_path: Path, size: int) -> None:
    table = (replace(TABLE[0], trainable=False, dtype="F32"), *TABLE[1:])
    checkpoint = save(tmp_path, MIXED)
    stored = np.asarray(true_values(TABLE[0], "weight", "F32")).reshape(-1)
    saved = dict.fromkeys(("weight", "exp_avg"), 0)
    for rank in range(size):
        snapshot = make_snapshot(3, size, rank, table=table)
        own = [item for item in snapshot.owned(rank) if item.tensor == "0.weight"]
        first = make_module().get_parameter("0.weight").detach().flatten().numpy()
        for item in own:
            start, stop = item.flat or (0, item.box.size)
            assert np.array_equal(snapshot.values(item), first[start:stop])
            saved[item.slot] += stop - start
        snapshot.load(checkpoint)
        for item in own:
            start, stop = item.flat or (0, item.box.size)
            read = checkpoint.read("0.weight").torch().reshape(-1)[start:stop].float()
            assert np.array_equal(snapshot.values(item), read.numpy())
            assert not np.array_equal(stored[start:stop], first[start:stop])
    assert saved == {"weight": len(stored), "exp_avg": 0}


def test_a_save_at_stage_3_rounds_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred tensors take two hundred roundings, and no item looks at the runs of the others."""
    many = [TensorSpec(f"many.{index}.weight", (3,), None, index) for index in range(200)]
    module = torch.nn.ModuleDict({"many": torch.nn.Sequential(*(torch.nn.LayerNorm(3, bias=False) for _ in many))})
    snapshot = make_snapshot(3, dtype=torch.bfloat16, table=tuple(many), module=module)
    rounded: list[tuple[object, ...]] = []
    real = torch.Tensor.to

    def counted(values: torch.Tensor, *to: Any, **how: Any) -> torch.Tensor:
        rounded.append(to)
        return real(values, *to, **how)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    calls = count_calls(lambda: [snapshot.values(item) for item in snapshot.owned(0)])
    assert len([to for to in rounded if to == (torch.bfloat16,)]) == 200
    assert calls < 200 * 4 * 100, calls


def save(folder: Path, slots: dict[str, str]) -> Checkpoint:
    """Saves random values of TABLE from two ranks."""
    return Checkpoint.open(save_step(folder / "run", TABLE, Layout(dp=2, zero=1), slots))


@pytest.mark.parametrize(("zero", "size"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_ranks_read_their_shards_from_a_checkpoint_of_another_layout(zero: int, size: int, tmp_path: Path) -> None:
    checkpoint, specs = save(tmp_path, MIXED), {spec.name: spec for spec in TABLE}
    counted = dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), 0)
    for rank in range(size):
        snapshot = make_snapshot(zero, size, rank)
        snapshot.load(checkpoint)
        for slot in counted:
            for shard, values in snapshot.optimizer.runs(slot):
                stored = np.asarray(true_values(specs[shard.piece.tensor.name], slot, "F32")).reshape(-1)
                assert np.array_equal(values.numpy(), stored[slice(*shard.flat)])
                counted[slot] += len(values)
    assert counted == dict.fromkeys(counted, NUM_ELEMENTS)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", ["F32", "BF16"])
@pytest.mark.parametrize("size", [1, 3])
def test_moments_of_either_dtype_are_read_into_either(
    tmp_path: Path, states: Literal["fp32", "bf16"], stored: str, size: int
) -> None:
    """fp32 moments become bf16 ones to the nearest; everything else is exact."""
    checkpoint = save(tmp_path, {"weight": "BF16", "master": "F32", "exp_avg": stored, "exp_avg_sq": stored})
    for rank in range(size):
        snapshot = make_snapshot(3, size, rank, states=states)
        snapshot.load(checkpoint)
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            for shard, values in snapshot.optimizer.runs(slot):
                read = checkpoint.read(shard.piece.tensor.name, slot=slot).torch().reshape(-1)[slice(*shard.flat)]
                assert values.dtype == (torch.bfloat16 if states == "bf16" and slot != "master" else torch.float32)
                assert torch.equal(values, read.to(values.dtype))
                assert not torch.equal(values, torch.zeros_like(values))


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_moments_are_saved_as_they_are(size: int) -> None:
    for rank in range(size):
        snapshot = make_snapshot(3, size, rank, torch.bfloat16, states="bf16")
        codes = {"weight": "BF16", "exp_avg": "BF16", "exp_avg_sq": "BF16", "master": "F32"}
        assert all(spec.slots == codes for spec in snapshot.table)
        held = {(shard.piece.tensor.name, shard.flat): values for shard, values in snapshot.optimizer.runs("exp_avg")}
        for item in snapshot.owned(rank):
            if item.slot == "exp_avg":
                values = held[item.tensor, item.flat or (0, item.box.size)]
                assert torch.equal(torch.from_numpy(snapshot.values(item)).view(torch.bfloat16), values)
                assert values.any()


def test_a_checkpoint_of_weights_gives_weights_and_cannot_be_resumed(tmp_path: Path) -> None:
    checkpoint, module = save(tmp_path, {"weight": "F32"}), make_module()
    snapshot = make_snapshot(1, module=module)
    with pytest.raises(
        CheckpointError, match=r"has no exp_avg of \d\.\w+, so it cannot be resumed: it holds weights only"
    ):
        snapshot.load(checkpoint)
    states = [values.clone() for _, values in snapshot.optimizer.runs("exp_avg")]
    snapshot.load_weights(checkpoint)
    snapshot.publish()
    for spec in TABLE:
        stored = np.asarray(true_values(spec, "weight", "F32"))
        assert np.array_equal(module.get_parameter(spec.name).detach().numpy(), stored)
    for (_, now), before in zip(snapshot.optimizer.runs("exp_avg"), states, strict=True):
        assert torch.equal(now, before), "optimizer states stay"


def test_a_tensor_with_the_slots_of_another_optimizer_is_named_with_them(tmp_path: Path) -> None:
    slots = {"weight": "BF16", "momentum": "BF16", "master": "F32"}
    table = (*with_slots(TABLE[:-1], MIXED), *with_slots(TABLE[-1:], slots))
    checkpoint = Checkpoint.open(save_table(tmp_path / "run", table, Layout()))
    with pytest.raises(
        CheckpointError, match=r"no exp_avg of 1\.bias, so .*: another optimizer saved it, with momentum, master\."
    ):
        make_snapshot(0).load(checkpoint)


def test_a_tensor_that_was_frozen_when_it_was_saved_is_named(tmp_path: Path) -> None:
    frozen = replace(TABLE[0], trainable=False)
    table = with_slots((frozen, *TABLE[1:]), {"weight": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"})
    checkpoint = Checkpoint.open(save_table(tmp_path / "run", table, Layout()))
    with pytest.raises(CheckpointError, match=r"has no exp_avg of 0\.weight, so .*: its run had frozen that tensor\."):
        make_snapshot(0).load(checkpoint)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    other = (*TABLE[:-1], replace(TABLE[-1], shape=(5,)))
    checkpoint = Checkpoint.open(save_step(tmp_path / "run", other, Layout(), MIXED))
    with pytest.raises(ShapeMismatch, match=r"1\.bias"):
        make_snapshot(0).load(checkpoint)
