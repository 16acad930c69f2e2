"""Parameters at ZeRO stage 3 outside of passes: reads are refused by name, and `full_parameters` gathers the values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import dlpack

from tk.core.errors import ConfigError, TkError
from tk.tests.rank_pool import RankPool
from tk.tests.train.zero.one_process import OPTIMIZER
from tk.train import initialize


class Tied(nn.Module):
    """A module with a parameter that has two names, a list of blocks and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss: torch.Tensor = (self.last(x) ** 2).mean()
        return loss


READS: dict[str, Callable[[nn.Module], object]] = {
    "a norm": lambda module: module.get_parameter("blocks.0.weight").norm(),
    "state_dict": lambda module: module.state_dict(),
    "a product": lambda module: torch.ones(4) @ module.get_parameter("last.weight"),
    "a copy": copy.deepcopy,
    "data": lambda module: module.get_parameter("blocks.1.bias").data,
    "numpy": lambda module: module.get_parameter("blocks.1.bias").numpy(force=True),
    "writing": lambda module: nn.init.zeros_(module.get_parameter("first.bias")),
}


@pytest.mark.parametrize("name", READS)
def test_reading_absent_values_is_refused_by_name(name: str) -> None:
    engine = initialize(Tied(), OPTIMIZER, zero=3)
    with pytest.raises(
        TkError, match=r"(first|last|blocks\.\d)\.(weight|bias) are spread.*full_parameters.*state_dict"
    ):
        READS[name](engine.module)


def test_shape_and_dtype_of_absent_parameters_can_be_read() -> None:
    module = Tied()
    plain = {name: (p.shape, p.dtype, p.device, p.requires_grad, p.numel()) for name, p in module.named_parameters()}
    engine = initialize(module, OPTIMIZER, zero=3)
    found = {name: (p.shape, p.dtype, p.device, p.requires_grad, p.numel()) for name, p in module.named_parameters()}
    assert found == plain
    assert "Linear(in_features=4" in repr(engine.module)
    weight = engine.module.get_parameter("first.weight")
    assert f"{weight}" == "first.weight: parameter of shape (4, 4), torch.float32, spread over the ranks"
    assert weight.grad is None


def test_native_code_that_reads_an_absent_parameter_finds_nan() -> None:
    """A C extension reads memory through a DLPack capsule; the capsule used to point to freed memory."""
    weight = initialize(Tied(), OPTIMIZER, zero=3).module.get_parameter("first.weight")
    seen = dlpack.from_dlpack(torch._C._to_dlpack(weight))
    assert seen.shape == (4, 4)
    assert torch.isnan(seen).all()


def read_and_change(zero: Any, precision: Any) -> dict[str, Any]:
    """Returns the state before and after a change of a parameter inside `full_parameters`, and after one more step."""
    module = Tied()
    engine = initialize(module, OPTIMIZER, zero=zero, precision=precision)
    before = engine.state_dict()
    shared = before["first.weight"].data_ptr() == before["last.weight"].data_ptr()
    with engine.full_parameters():
        inside = {name: value.clone() for name, value in module.state_dict().items()}
        with torch.no_grad():
            module.get_parameter("blocks.0.bias").fill_(0.5)
        loss = float(engine(torch.ones(1, 4, dtype=inside["first.weight"].dtype)).detach())
        with pytest.raises(ConfigError, match=r"step\(\) was called inside"):
            engine.step()
    after = engine.state_dict()
    engine.backward(engine(torch.ones(1, 4, dtype=inside["first.weight"].dtype)))
    engine.step()
    return {
        "alike": all(torch.equal(before[name], value) for name, value in inside.items()) and len(before) == len(inside),
        "shared": shared,
        "changed": after["blocks.0.bias"].tolist(),
        "kept": torch.equal(after["blocks.1.weight"], before["blocks.1.weight"]),
        "loss": loss,
        "stepped": {name: value.tolist() for name, value in engine.state_dict().items()},
    }


def test_whole_parameters_are_the_same_at_every_stage(rank_pool: RankPool) -> None:
    for precision in ("fp32", "bf16"):
        expected = read_and_change(0, precision)
        assert [expected["alike"], expected["shared"], expected["kept"]] == [True] * 3
        assert expected["changed"] == [0.5] * 4
        for zero in (1, 3):
            for found in rank_pool.run(read_and_change, 2, zero=zero, precision=precision):
                assert found == expected, (zero, precision)
