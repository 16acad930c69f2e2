"""The gradient of a trained parameter is refused by name while the engine holds it; copies are plain parameters."""

import copy
import weakref

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError
from tk.train.zero.trained_parameter import GradientState, TrainedParameter


def _parameter(state: GradientState | None) -> TrainedParameter:
    parameter = TrainedParameter(torch.ones(3))
    parameter.fqn = "layer.weight"
    parameter.gradients = weakref.ref(state) if state else None
    return parameter


def test_grad_is_none_or_an_error() -> None:
    state = GradientState()
    parameter = _parameter(state)
    assert parameter.grad is None
    parameter.grad = None
    with pytest.raises(ConfigError, match=r"layer\.weight\.grad was set"):
        parameter.grad = torch.ones(3)
    state.pending = True
    with pytest.raises(ConfigError, match=r"layer\.weight\.grad was read.*grad_clip.*engine\.zero_grad"):
        _ = parameter.grad
    with pytest.raises(ConfigError, match="was set"):
        del parameter.grad


def test_without_its_engine_it_is_a_plain_parameter() -> None:
    state = GradientState()
    parameter = _parameter(state)
    state.pending = True
    del state
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2, 2, 2]


def test_copies_are_plain() -> None:
    state = GradientState()
    parameter = _parameter(state)
    state.pending = True
    module = nn.Module()
    module.register_parameter("first", parameter)
    module.register_parameter("second", parameter)
    copied = copy.deepcopy(module)
    assert type(copied.first) is nn.Parameter
    assert copied.first is copied.second
    rebuild, arguments = parameter.__reduce_ex__(2)  # what pickle stores
    again = rebuild(*arguments)
    assert type(again) is nn.Parameter
    assert again.grad is None
    assert again.tolist() == [1, 1, 1]
