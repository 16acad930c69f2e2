"""Flat buffers: parameters and gradients are views of buckets, and a rank keeps the part of them for its stage."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tk.core.errors import TkError
from tk.tests.train.zero.small_buffers import NUM_ELEMENTS, TABLE, make_buffers, make_module, rows
from tk.train.zero.flat_buffers import FlatBuffers


def put_together(ranks: list[FlatBuffers]) -> dict[str, torch.Tensor]:
    """Returns each tensor's gradient from the runs that the ranks own; elements without an owner are NaN."""
    found = {spec.name: torch.full(spec.shape, torch.nan) for spec in TABLE}
    for buffers in ranks:
        for shard, grads in buffers.own_runs():
            place = found[shard.piece.tensor.name].view(-1)[slice(*shard.flat)]
            assert place.isnan().all(), "two ranks own an element"
            place.copy_(grads)
    return found


def test_parameters_are_views_of_their_buckets_and_keep_their_values() -> None:
    module, plain = make_module(), make_module()
    buffers = make_buffers(module, zero=0)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
    for bucket in buffers.buckets:
        bucket.params.fill_(7.0)
    assert all((parameter == 7.0).all() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("zero", "names", "runs"),
    [
        (0, [["1.weight", "1.bias", "0.bias"], ["0.weight"]], [[(0, True), (54, False)], [(0, True)]]),
        (3, [["1.weight", "1.bias"], ["0.weight", "0.bias"]], [[(0, True), (54, False)], [(0, True), (180, False)]]),
    ],
)
def test_backward_fills_the_first_bucket_first(
    zero: int, names: list[list[str]], runs: list[list[tuple[int, bool]]]
) -> None:
    """A bucket has at most 200 elements, at stage 3 of one layer; parameters with weight decay come first in it."""
    plans = [bucket.plan for bucket in make_buffers(make_module(), zero).buckets]
    assert [[param.name for param in plan.params] for plan in plans] == names
    assert [[(run.begin, run.decay) for run in plan.runs] for plan in plans] == runs


@pytest.mark.parametrize("zero", [0, 1])
def test_autograd_accumulates_in_the_buckets_below_stage_2(zero: int) -> None:
    module, plain = make_module(), make_module()
    buffers = make_buffers(module, zero)
    for step in range(2):
        module(rows(step)).square().sum().backward()
        plain(rows(step)).square().sum().backward()
    found = put_together([buffers])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    buffers.zero_grads()
    assert all(not bucket.grads.any() for bucket in buffers.buckets if bucket.grads is not None)


@pytest.mark.parametrize(
    ("zero", "params", "grads"),
    [(0, "whole", "whole"), (1, "whole", "whole"), (2, "whole", "part"), (3, "none", "part")],
)
def test_sizes_of_the_buffers_of_a_bucket(zero: int, params: str, grads: str) -> None:
    buffers = make_buffers(make_module(), zero, size=4, rank=1)
    for bucket in buffers.buckets:
        part = bucket.plan.size // (1 if zero == 0 else 4)
        assert bucket.sum.read(0, part).shape == bucket.own.read(0, part).shape == (part,)
        assert bucket.own_range == slice(0, part) if zero == 0 else slice(part, 2 * part)
        assert bucket.params.untyped_storage().size() == (0 if params == "none" else bucket.plan.size * 4)
        assert (bucket.grads is None) == (grads == "part")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_ranks_of_a_group_own_every_element_once(zero: int) -> None:
    ranks = [make_buffers(make_module(), zero, size=3, rank=rank) for rank in range(3)]
    for number, buffers in enumerate(ranks):
        for bucket in buffers.buckets:
            bucket.sum.put(torch.full((bucket.own.size,), number + 1.0))
    assert all(buffers.shards for buffers in ranks)
    found = put_together(ranks)
    assert not any(values.isnan().any() for values in found.values())
    squares = sum(float(buffers.owned_grad_square_sum()) for buffers in ranks)
    expected = sum(float(values.square().sum()) for values in found.values())
    assert squares == pytest.approx(expected, rel=1e-6), "padding is not counted"


def test_frozen_parameters_are_whole_below_stage_3_and_have_no_gradients() -> None:
    module = make_module()
    weight = module.get_parameter("0.weight").requires_grad_(False)
    table = (replace(TABLE[0], trainable=False), *TABLE[1:])
    buffers = make_buffers(module, zero=2, size=2, table=table)
    assert [local.name for local in buffers.unsharded] == ["0.weight"]
    assert [tensor is weight for local, tensor in buffers.unsharded_params() if not local.trainable] == [True]
    assert (buffers.frozen_buckets, buffers.frozen_shards) == ((), ())
    names = {
        shard.piece.tensor.name
        for rank in range(2)
        for shard in make_buffers(make_module(), 1, size=2, rank=rank, table=table).shards
    }
    assert names == {"0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_are_spread_over_the_ranks_at_stage_3(dtype: torch.dtype) -> None:
    table = (replace(TABLE[0], trainable=False), *TABLE[1:])
    found = torch.full((9 * 20,), torch.nan, dtype=dtype)
    for rank in range(3):
        module = make_module()
        weight = module.get_parameter("0.weight").requires_grad_(False)
        buffers = make_buffers(module, zero=3, size=3, rank=rank, dtype=dtype, table=table)
        assert [[local.name for local in bucket.plan.params] for bucket in buffers.frozen_buckets] == [["0.weight"]]
        assert (module.get_parameter("0.weight") is weight, weight.requires_grad) == (True, False)
        assert not buffers.unsharded
        assert buffers.frozen_buckets[0].own.size == 64, "a third, padded to 32 elements"
        with pytest.raises(TkError, match=r"The values of 0\.weight are spread over the ranks"):
            weight.sum()
        for shard in buffers.frozen_shards:
            assert buffers.read_frozen(shard, *shard.flat).dtype == dtype, "without masters"
            assert found[slice(*shard.flat)].isnan().all(), "two ranks hold an element"
            found[slice(*shard.flat)] = buffers.read_frozen(shard, *shard.flat)
    assert torch.equal(found, make_module().get_parameter("0.weight").detach().flatten().to(dtype))


def test_buffers_and_integers_stay_whole_at_stage_3() -> None:
    weight, bias, *others = (replace(spec, trainable=spec.layer != 0) for spec in TABLE)
    table = (replace(weight, buffer=True), replace(bias, dtype="I32"), *others)
    buffers = make_buffers(make_module(), zero=3, size=2, table=table)
    assert [local.name for local in buffers.unsharded] == ["0.weight", "0.bias"]
    assert buffers.frozen_buckets == ()


def test_parameters_on_the_meta_device_get_memory_and_tied_ones_stay_one_object() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(20, 9), nn.Linear(9, 6))
        module.register_parameter("tied", module.get_parameter("1.weight"))
    make_buffers(module, zero=0)
    for name, parameter in make_module().named_parameters():
        assert torch.equal(module.get_parameter(name), parameter)
    assert module.tied is module.get_parameter("1.weight")
    assert sum(parameter.numel() for parameter in module.parameters()) == NUM_ELEMENTS
