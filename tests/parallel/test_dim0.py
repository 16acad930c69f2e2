"""The dim0 rule of ZeRO against torch's own fully_shard on a mesh: the same rows on the same ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tk.core.buckets import buckets, shards
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.core.tensors import TensorSpec
from tk.tests.rank_pool import RankPool

SHAPES = {"one": (1, 4), "five": (5, 3), "seven": (7, 2, 2), "nine": (9, 2), "bias": (8,)}


class Parameters(nn.Module):
    """Parameters in which every element has a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            size = torch.Size(shape).numel()
            self.register_parameter(name, nn.Parameter(torch.arange(float(size)).reshape(shape)))


def held_by_fully_shard() -> dict[str, list[float]]:
    """Returns this rank's part of every parameter, flat."""
    world = torch.distributed.get_world_size()
    module = Parameters()
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.to_local().detach().flatten().tolist()
    return found


def test_rows_are_dealt_as_fully_shard_deals_them(rank_pool: RankPool) -> None:
    table = tuple(TensorSpec(name, shape) for name, shape in SHAPES.items())
    for world in (2, 4):
        layout = Layout(dp=world, zero=3, sharding="dim0")
        parts = buckets(local_params(table, layout, 0), layout)
        for rank, found in enumerate(rank_pool.run(held_by_fully_shard, world)):
            wanted: dict[str, list[float]] = {name: [] for name in SHAPES}
            for shard in shards(parts, layout, rank):
                wanted[shard.piece.tensor.name] += map(float, range(*shard.flat))
            assert found == wanted
