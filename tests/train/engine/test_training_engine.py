"""The training engine on one rank: steps equal those of torch, and parameters are whole where they are asked for."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError
from tk.core.layout import Layout
from tk.core.local_params import LocalParam
from tk.parallel.mesh import ALONE, Mesh
from tk.tests.train.zero.small_buffers import BUCKET_SIZE, TABLE, make_module, rows
from tk.train.config.sections import OptimizerSection, PrecisionSection
from tk.train.engine.training_engine import TrainingEngine, TrainingOptions
from tk.train.zero.parameter_gather import Unit

OPTIMIZER = OptimizerSection(grad_clip=0.5, weight_decay=0.3)
LR = 0.05


def make_engine(module: nn.Sequential, zero: int = 0, by_agreement: bool = False) -> TrainingEngine:
    """Returns an engine on `module`; at stage 3 each layer is a unit."""
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def fill(local: LocalParam, into: torch.Tensor) -> None:
        into.copy_(values[local.name])

    engine = TrainingEngine(
        (module,),
        TABLE,
        Mesh.alone(Layout(zero=zero, bucket_size=BUCKET_SIZE)),
        TrainingOptions(OPTIMIZER, PrecisionSection()),
        device=torch.device("cpu"),
        fill=fill,
    )
    if zero == 3:
        by_layer = {layer: [b for b in engine.buffers.buckets if b.plan.params[0].unit == layer] for layer in (0, 1)}
        units = [Unit(buckets, [module[layer]], name=str(layer)) for layer, buckets in by_layer.items()]
        if by_agreement:
            engine.gather_by_agreement(units, ALONE, prefetch=False)
        else:
            engine.gather_around([units], prefetch=True)
    return engine


def backward(engine: TrainingEngine, module: nn.Module, seeds: Sequence[int]) -> float:
    """Runs the micro-batches of a step; returns the gradient norm."""
    engine.begin_step()
    for seed in seeds:
        last = seed == seeds[-1]
        loss = module(rows(seed)).square().sum() * engine.loss_scale.value
        engine.end_pass(0)
        engine.begin_backward(0, last=last)
        loss.backward()
        engine.end_pass(0)
        engine.gradients_arrived(0, last=last)
    engine.meet_for_update()
    return float(engine.finish_backward().sqrt())


def train_with_torch(num_steps: int) -> tuple[nn.Module, list[float]]:
    """Returns the module after steps of two micro-batches each, and the gradient norms."""
    module, norms = make_module(), []
    groups = [
        {"params": [p for p in module.parameters() if (p.dim() >= 2) == decay], "weight_decay": 0.3 * decay}
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for seed in (1, 2):
            module(rows(seed)).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
    return module, norms


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize(("zero", "by_agreement"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_steps_of_two_micro_batches_equal_those_of_torch(zero: int, scale: float, by_agreement: bool) -> None:
    expected, norms = train_with_torch(3)
    module = make_module()
    engine = make_engine(module, zero, by_agreement)
    engine.loss_scale.value = scale
    for norm in norms:
        found = backward(engine, module, (1, 2))
        assert found == pytest.approx(norm, rel=1e-5)
        engine.update(LR, found)
    with engine.whole_parameters():
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(module.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_a_step_forgets_the_gradients_of_a_step_that_failed() -> None:
    module = make_module()
    engine = make_engine(module)
    alone = backward(engine, module, (1,))
    engine.begin_step()
    engine.begin_backward(0, last=False)
    module(rows(2)).square().sum().backward()
    assert backward(engine, module, (1,)) == alone


@pytest.mark.parametrize("zero", [0, 3])
def test_written_values_of_whole_parameters_stay(zero: int) -> None:
    module = make_module()
    engine = make_engine(module, zero)
    with engine.whole_parameters(), torch.no_grad():
        module.get_parameter("1.bias").fill_(7.0)
        with pytest.raises(
            ConfigError, match=r"engine\.step\(\) was called inside `with engine\.full_parameters\(\):`"
        ):
            engine.refuse_while_whole("engine.step()")
    engine.refuse_while_whole("engine.step()")
    with engine.whole_parameters():
        assert module.get_parameter("1.bias").tolist() == [7.0] * 6
        assert torch.equal(module.get_parameter("0.weight"), make_module().get_parameter("0.weight"))


def test_parameters_come_one_unit_at_a_time() -> None:
    module, expected = make_module(), make_module()
    engine = make_engine(module, 3)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {names[id(parameter)]: parameter.tolist() for parameter in engine.parameters_one_by_one()}
    assert found == {name: parameter.tolist() for name, parameter in expected.named_parameters()}
    assert all(unit.pending is None for gather in engine.gathers for unit in gather.units), "all are free again"


def test_a_pass_that_fails_raises_its_own_error_and_frees_all_units() -> None:
    module = make_module()
    engine = make_engine(module, 3, by_agreement=True)

    def fail(module: nn.Module, inputs: object) -> None:
        raise ValueError("the user's own")

    module[0].register_forward_pre_hook(fail)  # after the hook that gathers the first layer
    with pytest.raises(ValueError, match="the user's own"), engine.whole_pass():
        module(rows())
    assert all(unit.pending is None for gather in engine.gathers for unit in gather.units)
