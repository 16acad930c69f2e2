"""Sharded AdamW: the updates of all ranks of a group equal torch's AdamW on whole parameters."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tk.core import state_pieces
from tk.tests.train.zero.small_buffers import TABLE, make_buffers, make_module, rows
from tk.train.config.sections import OffloadSection, OptimizerSection
from tk.train.zero.sharded_adamw import ShardedAdamW
from tk.train.zero.states.open_states import StatePlaces

OPTIONS = OptimizerSection(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
LR, STEPS = 0.05, 3


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Returns a gradient of every tensor, so small that eps matters."""
    module = make_module()
    (1e-3 * module(rows(step)).square().sum()).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def updated_by_torch(grad_scale: float) -> dict[str, Any]:
    """Returns the parameters and both moments after STEPS steps of torch's AdamW."""
    module = make_module()
    decayed = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.9), eps=1e-6)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            module.get_parameter(name).grad = gradient * grad_scale
        optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in module.named_parameters()}
    return {"master": dict(module.named_parameters())} | {
        slot: {name: state[slot] for name, state in states.items()} for slot in ("exp_avg", "exp_avg_sq")
    }


def update(
    module: nn.Module,
    zero: int,
    size: int,
    rank: int,
    dtype: torch.dtype,
    grad_scale: float,
    options: OptimizerSection = OPTIONS,
    **more: Any,
) -> ShardedAdamW:
    """Returns one rank's optimizer after STEPS steps.

    There are no other ranks, and below stage 3 a step gathers parameters, so `size` is 1 there.
    """
    buffers = make_buffers(module, zero, size=size, rank=rank, dtype=dtype, options=options)
    optimizer = ShardedAdamW(buffers, options, **more)
    for step in range(STEPS):
        found = gradients(step)
        for shard, place in buffers.own_runs():
            place.copy_(found[shard.piece.tensor.name].view(-1)[slice(*shard.flat)])
        optimizer.step(LR, grad_scale)
    return optimizer


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_together_equal_the_adamw_of_torch(size: int, grad_scale: float) -> None:
    expected = updated_by_torch(grad_scale)
    ranks = [update(make_module(), 3, size, rank, torch.float32, grad_scale) for rank in range(size)]
    for slot, tensors in expected.items():
        found = {spec.name: torch.full(spec.shape, torch.nan) for spec in TABLE}
        for optimizer in ranks:
            for shard, values in optimizer.runs(slot):
                found[shard.piece.tensor.name].view(-1)[slice(*shard.flat)] = values
        for name, values in tensors.items():
            # values are differences of larger numbers: masters of numbers near 1, moments of the largest moments
            smallest = 1e-7 * (1.0 if slot == "master" else float(values.abs().max()))
            torch.testing.assert_close(found[name], values.detach(), rtol=1e-6, atol=smallest, msg=f"{slot} of {name}")


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_below_stage_3_the_module_has_the_new_values_at_once(zero: int) -> None:
    module = make_module()
    optimizer = update(module, zero, 1, 0, torch.float32, 1.0)
    assert set(optimizer.buffers.table[0].states) == {"exp_avg", "exp_avg_sq"}, "fp32 parameters are their own masters"
    for name, values in updated_by_torch(1.0)["master"].items():
        torch.testing.assert_close(module.get_parameter(name), values, rtol=1e-6, atol=1e-7)


def test_low_precision_parameters_are_rounded_masters() -> None:
    module = make_module()
    optimizer = update(module, 1, 1, 0, torch.bfloat16, 1.0)
    for shard, master in optimizer.runs("master"):
        assert master.dtype == torch.float32
        parameter = module.get_parameter(shard.piece.tensor.name)
        assert torch.equal(parameter.view(-1)[slice(*shard.flat)], master.bfloat16())
        assert not torch.equal(master, master.bfloat16().float()), "the master has more digits"


def test_values_that_a_user_writes_into_whole_parameters_reach_the_masters() -> None:
    module = make_module()
    optimizer = update(module, 1, 1, 0, torch.bfloat16, 1.0)
    before = {shard.piece.tensor.name: values.clone() for shard, values in optimizer.runs("master")}
    with torch.no_grad():
        module.get_parameter("0.weight")[1, 2] = 5.0
    optimizer.take_written_values()
    for shard, master in optimizer.runs("master"):
        name = shard.piece.tensor.name
        changed = master != before[name]
        assert changed.nonzero().flatten().tolist() == ([1 * 20 + 2] if name == "0.weight" else [])
        assert (master[changed] == 5.0).all()


def whole(ranks: list[ShardedAdamW], slot: str) -> torch.Tensor:
    """Returns a slot of all tensors, end to end, from the ranks that hold it."""
    found = {spec.name: torch.full(spec.shape, torch.nan) for spec in TABLE}
    for optimizer in ranks:
        for shard, values in optimizer.runs(slot):
            found[shard.piece.tensor.name].view(-1)[slice(*shard.flat)] = values.float()
    return torch.cat([values.reshape(-1) for values in found.values()])


@pytest.mark.parametrize("tier", ["none", "cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_moments_have_the_same_bits_at_every_cut(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype, tier: Literal["none", "cpu", "disk"]
) -> None:
    """However many ranks share the buckets, and on disk in pieces of any size."""
    options, slots = OPTIONS.model_copy(update={"states": "bf16"}), ("master", "exp_avg", "exp_avg_sq")
    alone = [update(make_module(), 3, 1, 0, dtype, 0.25, options, seed=7)]
    expected = {slot: whole(alone, slot) for slot in slots}
    assert alone[0].buffers.table[0].states["exp_avg_sq"] == "BF16"
    monkeypatch.setattr(state_pieces.cut, "__defaults__", (50,))
    for size in (1, 2, 3):
        places = StatePlaces(torch.device("cpu"), OffloadSection(optimizer=tier), tmp_path)
        place = {"places": places, "seed": 7}
        ranks = [update(make_module(), 3, size, rank, dtype, 0.25, options, **place) for rank in range(size)]
        for slot, values in expected.items():
            assert torch.equal(whole(ranks, slot), values), slot
        for each in ranks:
            each.close()
    other = [update(make_module(), 3, 1, 0, dtype, 0.25, options, seed=8)]
    assert torch.equal(whole(other, "exp_avg"), expected["exp_avg"])
    assert not torch.equal(whole(other, "exp_avg_sq"), expected["exp_avg_sq"])


def test_bf16_moments_are_those_of_fp32_but_for_rounding() -> None:
    narrow = [update(make_module(), 1, 1, 0, torch.float32, 1.0, OPTIONS.model_copy(update={"states": "bf16"}))]
    wide = [update(make_module(), 1, 1, 0, torch.float32, 1.0)]
    for slot, tolerance in (("master", 2e-3), ("exp_avg", 2**-7), ("exp_avg_sq", 2**-6)):
        largest = float(whole(wide, slot).abs().max())
        torch.testing.assert_close(whole(narrow, slot), whole(wide, slot), rtol=tolerance, atol=tolerance * largest)
    assert not torch.equal(whole(narrow, "master"), whole(wide, "master"))
