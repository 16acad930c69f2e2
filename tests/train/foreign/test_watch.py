"""A module that is changed after `initialize` is neither trained nor saved as something else: the next step says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError
from tk.tests.train.foreign.test_buffers import Running
from tk.train import initialize


def _replace(module: nn.Module) -> None:
    module.linear = nn.Linear(3, 3)


def _freeze(module: nn.Module) -> None:
    module.get_parameter("linear.weight").requires_grad_(False)


def _add(module: nn.Module) -> None:
    module.adapter = nn.Linear(3, 3)


def _add_buffer(module: nn.Module) -> None:
    module.register_buffer("late", torch.ones(1))


def _drop_buffer(module: nn.Module) -> None:
    del module.newest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace, r"parameter linear.weight was replaced"),
        (_freeze, r"parameter linear.weight was frozen after initialize"),
        (_add, "parameter adapter.weight was added"),
        (_add_buffer, "buffer late was added"),
        (_drop_buffer, "buffer newest was removed after initialize"),
    ],
)
def test_a_module_that_was_changed_afterwards_is_not_saved(tmp_path: Path, change: Any, message: str) -> None:
    module = Running()
    engine = initialize(module)
    change(module)
    with pytest.raises(ConfigError, match=message):
        engine.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _cast(module: nn.Module) -> None:
    module.half()


@pytest.mark.parametrize(
    ("change", "precision", "zero", "message"),
    [
        (_cast, "fp32", 1, r"Move or cast .to, half. the module before"),
        (_freeze, "fp32", 3, "linear.weight was frozen"),
    ],
)
def test_the_next_step_raises_it(change: Any, precision: Any, zero: Any, message: str) -> None:
    module = nn.Sequential()
    module.add_module("linear", nn.Linear(3, 3))
    engine = initialize(module, precision=precision, zero=zero)
    x = torch.ones(2, 3, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    for _ in range(2):
        engine.backward(engine(x).sum())
        engine.step()
    engine.backward(engine(x).sum())

    def change_and_step() -> None:
        change(module)
        engine.step()

    with pytest.raises(ConfigError, match=message):
        change_and_step()


def test_written_in_place_in_fp32_it_is_trained_on_from_there() -> None:
    module = nn.Linear(3, 3)
    engine = initialize(module, {"lr": 1e-9, "weight_decay": 0.0}, zero=1)
    module.load_state_dict({"weight": torch.full((3, 3), 2.0), "bias": torch.zeros(3)})
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert torch.allclose(module.weight, torch.full((3, 3), 2.0))
