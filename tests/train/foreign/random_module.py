"""A module whose construction does with random numbers and values what modules do, built as always and on meta."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from tk.train import on_meta

Built = TypeVar("Built", bound=nn.Module)


def built_twice(make: Callable[[], Built], seed: int = 0) -> tuple[Built, Built]:
    """Returns the module built as always, and built on meta."""
    torch.manual_seed(seed)
    ordinary = make()
    torch.manual_seed(seed)
    with on_meta():
        absent = make()
    return ordinary, absent


class Noisy(nn.Module):
    """Random buffers among random parameters, a seed set and a state kept in between, values that are read."""

    noise: torch.Tensor

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("noise", torch.randn(3))
        self.second = nn.Linear(4, 4)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.third = nn.Linear(4, 4)
            torch.manual_seed(seed)
            self.fourth = nn.Linear(4, 4)
        self.fifth = nn.Parameter(torch.rand(4, 4) * self.first.weight.std().item())
        own = torch.Generator().manual_seed(1)
        nn.init.normal_(self.fourth.bias, generator=own)
        self.register_buffer("more", torch.rand(2, generator=own))
        self.register_buffer("scales", self.second.weight.abs().amax(1), persistent=False)
        self.largest = self.third.weight.max().item()
        self.listed = self.first.bias.tolist()
        self.plain = self.second.bias * 2
        with torch.no_grad():
            self.second.weight[self.first.weight > 0] = 0.0
            self.fifth[1].copy_(self.noise.new_zeros(4))
        self.noise.mul_(self.first.weight.device == torch.device("cpu"))
