"""Flat buffers of a small module for any rank of a ZeRO group, made in one process without the other ranks."""

import torch
from torch import nn

from tk.core.dtypes import Precision
from tk.core.layout import Layout
from tk.core.local_params import LocalParam
from tk.core.tensors import TensorSpec
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.train.config.sections import OptimizerSection
from tk.train.config.tensor_slots import with_run_slots
from tk.train.zero.flat_buffers import FlatBuffers
from tk.train.zero.states.open_states import StatePlaces

# Two layers, with 180 + 9 and 54 + 6 elements: a rank's range of a bucket is a multiple of 32 elements, so that up to 3
# ranks have parts of both layers' weights, and the border between weight and bias is in a later rank's range.
TABLE = (
    TensorSpec("0.weight", (9, 20), None, 0),
    TensorSpec("0.bias", (9,), None, 0),
    TensorSpec("1.weight", (6, 9), None, 1),
    TensorSpec("1.bias", (6,), None, 1),
)
ADAMW = OptimizerSection()
BUCKET_SIZE, NUM_ELEMENTS = 200, 249


def make_module() -> nn.Sequential:
    """Returns a module with TABLE's parameters and the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 9), nn.Linear(9, 6))


def make_buffers(
    module: nn.Module,
    zero: int,
    *,
    size: int = 1,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    table: tuple[TensorSpec, ...] = TABLE,
    options: OptimizerSection = ADAMW,
) -> FlatBuffers:
    """Returns the buffers of rank `rank` in a shard group of `size` ranks, for an optimizer with these options.

    They are filled with the values of `make_module`; parameters of other names keep the module's own.
    """
    layout = Layout(dp=size, zero=zero, bucket_size=BUCKET_SIZE)
    group = Group(None, rank, size) if zero else ALONE
    mesh = Mesh(layout, layout.coordinates(rank), ALONE, ALONE, ALONE, group, ALONE)
    named = [*module.named_parameters(), *make_module().named_parameters()]
    values = {name: parameter.detach().clone() for name, parameter in named}

    def fill(local: LocalParam, into: torch.Tensor) -> None:
        into.copy_(values[local.name])

    params: Precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    table = with_run_slots(table, params, options)
    return FlatBuffers((module,), table, mesh, dtype=dtype, places=StatePlaces(torch.device("cpu")), fill=fill)


def rows(seed: int = 0) -> torch.Tensor:
    """Returns a batch for the module, fp32 [5, 20]."""
    return torch.randn(5, 20, generator=torch.Generator().manual_seed(seed))
