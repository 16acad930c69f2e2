"""A foreign module as a table of tensors, its units at ZeRO stage 3, and its whole state."""

import pytest
import torch
from torch import nn

from tk.core.layout import Layout
from tk.core.local_params import LocalParam
from tk.core.tensors import TensorSpec
from tk.parallel.mesh import Mesh
from tk.train.config.sections import OptimizerSection, PrecisionSection
from tk.train.engine.training_engine import TrainingEngine, TrainingOptions
from tk.train.foreign.blocks import find_blocks
from tk.train.foreign.model import ForeignModel, whole_state


class Small(nn.Module):
    """Two blocks with a parameter in common, one of their own each, a tied head, a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.blocks[1].bias = self.blocks[0].bias
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def make_model() -> ForeignModel:
    module = Small()
    return ForeignModel.of(module, find_blocks(module))


def make_engine(model: ForeignModel, zero: int) -> TrainingEngine:
    values = {name: value.clone() for name, value in model.module.state_dict().items()}

    def fill(local: LocalParam, into: torch.Tensor) -> None:
        into.copy_(values[local.name])

    engine = TrainingEngine(
        (model.module,),
        model.table,
        Mesh.alone(Layout(zero=zero)),
        TrainingOptions(OptimizerSection(), PrecisionSection()),
        device=torch.device("cpu"),
        fill=fill,
    )
    if zero == 3:
        engine.gather_around([model.units(engine.buffers)], prefetch=False)
    return engine


def test_the_table_has_every_tensor_once_and_further_names_as_aliases() -> None:
    assert make_model().table == (
        TensorSpec("scale", (4,), layer="first", trainable=False, dtype="F32"),
        TensorSpec("seen", (), layer="first", trainable=False, dtype="I64", buffer=True),
        TensorSpec("embed.weight", (5, 4), layer="first"),
        TensorSpec("blocks.0.weight", (4, 4), layer=0),
        TensorSpec("blocks.0.bias", (4,), layer="first"),  # of two blocks, so of neither
        TensorSpec("blocks.1.weight", (4, 4), layer=1),
        TensorSpec("blocks.1.bias", (4,), layer="first", alias="blocks.0.bias"),
        TensorSpec("head.weight", (5, 4), layer="first", alias="embed.weight"),
    )


def test_units_are_the_rest_of_the_module_and_its_blocks() -> None:
    model = make_model()
    units = model.units(make_engine(model, 3).buffers)
    assert [(unit.name, unit.kept_for_backward) for unit in units] == [
        ("the parameters outside of blocks", True),
        ("blocks.0", False),
        ("blocks.1", False),
    ]
    names = [[local.name for bucket in unit.buckets for local in bucket.plan.params] for unit in units]
    assert [sorted(each) for each in names] == [
        ["blocks.0.bias", "embed.weight", "scale"],
        ["blocks.0.weight"],
        ["blocks.1.weight"],
    ]
    assert [unit.modules for unit in units] == [[model.module], *([block] for block in model.blocks.values())]


@pytest.mark.parametrize("zero", [0, 3])
def test_the_whole_state_is_a_copy_in_which_shared_tensors_are_shared(zero: int) -> None:
    model = make_model()
    state = whole_state(model.module, make_engine(model, zero))
    expected = Small().state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        assert not state[name].requires_grad
    assert state["head.weight"] is state["embed.weight"]
    if zero == 0:
        state["embed.weight"].zero_()
        assert model.module.get_parameter("embed.weight").any(), "the module keeps its own"
