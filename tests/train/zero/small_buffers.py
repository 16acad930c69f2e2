"""Flat buffers of a small module for any rank of a ZeRO group, made in one process without the other ranks."""

import torch
from torch import nn

from tk.core.layout import Coordinates, Layout
from tk.core.local_params import LocalParam
from tk.core.tensors import TensorSpec
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.train.zero.flat_buffers import FlatBuffers

# Two layers, with 12 + 3 and 6 + 2 elements.
TABLE = (
    TensorSpec("0.weight", (3, 4), None, 0),
    TensorSpec("0.bias", (3,), None, 0),
    TensorSpec("1.weight", (2, 3), None, 1),
    TensorSpec("1.bias", (2,), None, 1),
)
NUM_ELEMENTS = 23


def make_module() -> nn.Sequential:
    """Returns a module with TABLE's parameters and the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def make_buffers(
    module: nn.Module,
    zero: int,
    *,
    size: int = 1,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    table: tuple[TensorSpec, ...] = TABLE,
) -> FlatBuffers:
    """Returns the buffers of rank `rank` in a shard group of `size` ranks, filled with the values of `make_module`."""
    layout = Layout(dp=size, zero=zero, bucket_size=16)
    group = Group(None, rank, size) if zero else ALONE
    mesh = Mesh(layout, Coordinates(0, rank, 0), ALONE, ALONE, ALONE, group, ALONE)
    values = {name: parameter.detach().clone() for name, parameter in make_module().named_parameters()}

    def fill(local: LocalParam, into: torch.Tensor) -> None:
        into.copy_(values[local.name])

    return FlatBuffers((module,), table, mesh, dtype=dtype, device=torch.device("cpu"), fill=fill)


def rows(seed: int = 0) -> torch.Tensor:
    """Returns a batch for the module, fp32 [5, 4]."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
