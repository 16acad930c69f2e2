"""The tensors of a module's output are found in any container; their hooks gather parameters for backward."""

from collections import OrderedDict, UserList, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from tk.tests.train.zero.one_process import OPTIMIZER
from tk.train import initialize
from tk.train.zero.outputs import tensors_in


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Result:
    value: Any
    more: list[Any] = field(default_factory=list)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Node:
    """An object with a reference to itself."""

    def __init__(self, value: Any) -> None:
        self.value, self.itself = value, self


WRAPPINGS: dict[str, Any] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (1, x),
    "dict": lambda x: OrderedDict(a=None, b=x),
    "namedtuple": lambda x: Pair("left", x),
    "dataclass": lambda x: Result(0, [{"deep": (x,)}]),
    "model output": lambda x: BaseModelOutput(last_hidden_state=x),
    "deque": lambda x: deque([x]),
    "user list": lambda x: UserList([x]),
    "slots": Slotted,
    "cycle": Node,
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_a_tensor_is_found_once_in_any_wrapping(name: str) -> None:
    x = torch.ones(2)
    assert [found is x for found in tensors_in(WRAPPINGS[name](x))] == [True]
    assert len(list(tensors_in((WRAPPINGS[name](x), x)))) == 1


def test_modules_and_functions_are_not_searched() -> None:
    assert list(tensors_in({"a": nn.Linear(2, 2), "b": "text", "c": torch.float32, "d": len})) == []


class Wrapped(nn.Module):
    """Blocks that return a wrapped tensor."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Wrapper(name) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            (x,) = tensors_in(block(x))
        return (x**2).mean()


class Wrapper(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 4), name

    def forward(self, x: torch.Tensor) -> Any:
        return WRAPPINGS[self.name](torch.tanh(self.linear(x)))


@pytest.mark.parametrize("name", ["dataclass", "namedtuple", "slots"])
def test_backward_gathers_parameters_for_any_output(name: str) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    plain, module = Wrapped(name), Wrapped(name)
    plain(x).backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    engine = initialize(module, OPTIMIZER, zero=3)
    engine.backward(engine(x))
    engine.step()
    assert engine.last_grad_norm == pytest.approx(norm, rel=1e-6)
