"""The blocks of a foreign module, which ZeRO stage 3 gathers one by one."""

import logging
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError
from tk.tests.train.zero.one_process import OPTIMIZER
from tk.train import initialize
from tk.train.foreign.blocks import find_blocks
from tk.train.zero.absent import AbsentParameter


class Own(nn.Sequential):
    """A sequence with a forward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self[0].get_parameter("weight")


def _linear() -> nn.Module:
    return nn.Linear(2, 2)


SHARED = nn.Linear(2, 2)

FOUND: dict[str, tuple[nn.Module, list[str]]] = {
    "list": (nn.ModuleDict({"layers": nn.ModuleList([_linear(), _linear()])}), ["layers.0", "layers.1"]),
    "sequence": (nn.Sequential(_linear(), nn.Tanh(), _linear()), ["0", "1", "2"]),
    "dict": (nn.ModuleDict({"a": _linear(), "b": _linear()}), ["a", "b"]),
    "sequence in a sequence": (nn.Sequential(_linear(), nn.Sequential(_linear(), _linear())), ["0", "1.0", "1.1"]),
    "one of its own forward": (nn.Sequential(_linear(), Own(_linear(), _linear())), ["0", "1"]),
    "one alone": (nn.Sequential(nn.Sequential(OrderedDict(a=_linear(), b=_linear()))), ["0.a", "0.b"]),
    "outermost": (nn.Sequential(nn.TransformerEncoderLayer(4, 2), _linear()), ["0", "1"]),
    "one twice": (nn.ModuleDict({"a": nn.ModuleList([SHARED, SHARED, _linear()])}), ["a.0", "a.2"]),
    "none": (nn.TransformerEncoderLayer(4, 2), []),
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks(name: str) -> None:
    module, blocks = FOUND[name]
    assert list(find_blocks(module)) == blocks


def test_modules_that_are_gathered_together_are_no_blocks() -> None:
    module = nn.ModuleDict({"deep": nn.ModuleList(_linear() for _ in range(3)), "wide": _linear()})
    assert list(find_blocks(module, ["deep.[02]"])) == ["deep.1", "wide"]
    assert list(find_blocks(module, ["deep", module["wide"]])) == []
    assert list(find_blocks(module, "deep")) == ["wide"]
    with pytest.raises(ConfigError, match=r"'deep\.5' is no block .* blocks are deep\.0, deep\.1, deep\.2 and 1 more"):
        find_blocks(module, ["deep.5"])
    with pytest.raises(ConfigError, match=r"'layers' is no block"):
        initialize(nn.Sequential(_linear(), _linear()), OPTIMIZER, gather_together=["layers"])


def test_sizes_of_units_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    initialize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16)), OPTIMIZER, zero=3)
    assert caplog.messages == ["ZeRO stage 3: 2 blocks are gathered one by one, the largest 1 with 576 B."]
    caplog.clear()
    initialize(nn.TransformerEncoderLayer(4, 2, dim_feedforward=8), OPTIMIZER, zero=3)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "No blocks were found" in record.getMessage()
    assert "688 B that belong to no block are whole during every pass (self_attn.in_proj_weight" in record.getMessage()


def _gathered(engine: object, module: nn.Module, x: torch.Tensor) -> int:
    """Most bytes of parameters that are there at once during a forward pass."""
    sizes: list[int] = []

    def count(of: nn.Module, inputs: object, output: object) -> None:
        here = [p for p in module.parameters() if not isinstance(p, AbsentParameter)]
        sizes.append(sum(p.nbytes for p in here))

    hooks = [part.register_forward_pre_hook(lambda of, inputs: count(of, inputs, None)) for part in module.modules()]
    assert callable(engine)
    engine(x)
    for hook in hooks:
        hook.remove()
    return max(sizes)


def test_a_sequence_is_never_whole() -> None:
    """It was gathered at once."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    engine = initialize(module, OPTIMIZER, zero=3)
    whole = sum(p.nbytes for p in module.parameters())
    assert 0 < _gathered(engine, module, torch.ones(1, 8)) <= whole / 3
