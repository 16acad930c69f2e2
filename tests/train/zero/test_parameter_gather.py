"""ZeRO stage 3: the units that are gathered at each moment of forward and backward."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tk.core.errors import TkError
from tk.tests.train.zero.small_buffers import TABLE, make_buffers, make_module, rows
from tk.train.zero.flat_bucket import ParameterBucket
from tk.train.zero.flat_buffers import FlatBuffers
from tk.train.zero.parameter_gather import ParameterGather, Unit
from tk.train.zero.trained_parameter import autograd_grad


class Stage:
    """A module of two units on one rank.

    Args:
        frozen: the unit that is not trained, if one is not.

    Attributes:
        seen: for each call of a module's forward, the units that have memory: both if the second one is prefetched
            while the first computes.
    """

    def __init__(self, prefetch: bool = False, chain: bool = True, frozen: int | None = None) -> None:
        self.module = make_module()
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(not name.startswith(f"{frozen}."))
        table = tuple(replace(spec, trainable=spec.layer != frozen) for spec in TABLE)
        self.buffers: FlatBuffers = make_buffers(self.module, zero=3, table=table)
        earlier, later = sorted(self.buffers.all_buckets, key=lambda bucket: str(bucket.plan.unit))
        self.units = [Unit([earlier], [self.module[0]]), Unit([later], [self.module[1]])]
        self.gather = ParameterGather(self.buffers, self.units, prefetch=prefetch, chain=chain)
        self.seen: list[list[int]] = []
        for layer in self.module:
            layer.register_forward_pre_hook(lambda *_: self.seen.append(self.held()))

    def held(self) -> list[int]:
        """Returns the units that have memory."""
        return [
            number
            for number, unit in enumerate(self.units)
            if all(bucket.params.untyped_storage().size() for bucket in unit.buckets)
        ]

    def forward(self) -> torch.Tensor:
        """Returns the output for a batch, [5, 2]."""
        with self.gather.saved.hooks():
            output: torch.Tensor = self.module(rows())
        return output


@pytest.mark.parametrize(("prefetch", "seen"), [(False, [[0], [1]]), (True, [[0, 1], [1]])])
def test_forward_gathers_a_unit_before_its_call_and_frees_it_after(prefetch: bool, seen: list[list[int]]) -> None:
    stage = Stage(prefetch)
    assert stage.held() == []
    output = stage.forward()
    assert stage.seen == seen
    assert stage.held() == []
    assert torch.equal(output, make_module()(rows()))


def gradients_seen(stage: Stage) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Returns the gradients by name, and the gathered units at each weight's gradient, last layer first."""
    found: dict[str, torch.Tensor] = {}
    held: list[list[int]] = []

    def take(name: str, gradient: torch.Tensor) -> None:
        found[name] = gradient
        if name.endswith("weight"):
            held.append(stage.held())

    for bucket in stage.buffers.buckets:
        for local, parameter in zip(bucket.plan.params, bucket.parameters, strict=True):
            parameter.register_hook(partial(take, local.name))
    output = stage.forward()
    stage.gather.begin_backward()
    output.square().sum().backward()
    return found, held


@pytest.mark.parametrize("prefetch", [False, True])
def test_backward_gathers_again_and_has_the_gradients_of_the_plain_module(prefetch: bool) -> None:
    stage, plain = Stage(prefetch), make_module()
    grads, held = gradients_seen(stage)
    assert 1 in held[0], "the gradient of the last layer's input needs its weight"
    stage.gather.end_pass()
    assert stage.held() == []
    plain(rows()).square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_in_a_chain_a_unit_is_freed_when_the_one_before_it_is_gathered() -> None:
    stage = Stage(chain=True)
    _, held = gradients_seen(stage)
    assert held[-1] == [0], "the first layer's gradients come last, after the second layer is freed"


def test_outside_a_chain_a_unit_stays_until_all_its_gradients_have_arrived() -> None:
    stage = Stage(chain=False)
    gradients_seen(stage)
    later, earlier = stage.buffers.buckets
    assert stage.held() == [0, 1]
    stage.gather.on_bucket_complete(later)
    assert stage.held() == [0]
    stage.gather.on_bucket_complete(earlier)
    assert stage.held() == []


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_frozen_unit_is_gathered_where_it_computes_and_others_have_the_plain_gradients(
    prefetch: bool, chain: bool, frozen: int
) -> None:
    stage, plain = Stage(prefetch, chain, frozen), make_module()
    output = stage.forward()
    assert (stage.held(), stage.seen[1]) == ([], [1])
    plain_output = plain(rows())
    assert torch.equal(output, plain_output)
    held: list[list[int]] = []
    for parameter in stage.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: held.append(stage.held()))
    stage.gather.begin_backward()
    output.square().sum().backward()
    stage.gather.end_pass()
    assert stage.held() == []
    plain_output.square().sum().backward()
    for bucket in stage.buffers.buckets:
        for local, parameter in zip(bucket.plan.params, bucket.parameters, strict=True):
            torch.testing.assert_close(autograd_grad(parameter), plain.get_parameter(local.name).grad)
    assert held == ([[1], [1]] if frozen == 0 else [[0], [0]]), "nothing learns before unit 0; unit 1 is freed in time"


def test_a_frozen_part_is_copied_back_only_if_a_pass_has_written_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(chain=False, frozen=0)
    [bucket] = stage.buffers.frozen_buckets
    taken: list[ParameterBucket] = []
    real = ParameterBucket.take_written

    def take_written(each: ParameterBucket) -> None:
        taken.append(each)
        real(each)

    monkeypatch.setattr(ParameterBucket, "take_written", take_written)
    stage.forward()
    assert bucket not in taken

    def write(module: nn.Module, inputs: object) -> None:
        with torch.no_grad():
            module.get_parameter("bias").fill_(0.25)

    stage.module[0].register_forward_pre_hook(write)
    stage.forward()
    assert bucket in taken
    with stage.gather.hold_all():
        assert torch.equal(stage.module.get_parameter("0.bias"), torch.full((9,), 0.25))


def test_a_module_that_is_recomputed_in_backward_frees_no_unit() -> None:
    stage = Stage()
    stage.gather.begin_backward()
    stage.module[1](torch.ones(1, 9))
    assert stage.held() == [1]
    stage.gather.end_pass()
    assert stage.held() == []


def test_a_unit_that_is_kept_for_backward_stays_from_its_start_to_its_end() -> None:
    stage = Stage()
    stage.units[1].kept_for_backward = True
    stage.gather.begin_backward()
    assert stage.held() == [1]
    stage.gather.end_pass()
    assert stage.held() == []


def test_hold_all_keeps_units_gathered_through_calls() -> None:
    stage = Stage()
    with stage.gather.hold_all():
        assert stage.held() == [0, 1]
        stage.forward()
        assert stage.held() == [0, 1]
        assert torch.equal(stage.module.get_parameter("0.weight"), make_module().get_parameter("0.weight"))
    assert stage.held() == []
    with pytest.raises(TkError, match=r"0\.weight"):
        stage.module.get_parameter("0.weight").sum()


def test_each_unit_gathers_one_unit_at_a_time() -> None:
    stage = Stage()
    held = []
    for unit in stage.gather.each_unit():
        assert isinstance(unit.modules[0], nn.Linear)
        held.append(stage.held())
    assert held == [[0], [1]]
    assert stage.held() == []
