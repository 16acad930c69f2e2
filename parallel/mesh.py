"""Process groups by mesh axis, passed by hand to whoever communicates: there is no global group object."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..core.errors import ParallelError
from ..core.layout import Coordinates, Layout


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that one communicates with along an axis; `process_group` is None where one is alone."""

    process_group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's groups along every axis of a layout.

    Attributes:
        replicate: ranks that hold the same optimizer shard (all of dp at ZeRO stage 0).
        shard: ranks over which one copy of the optimizer state is spread.
        kv_heads: ranks that hold the same kv heads, where tp exceeds their number.
        ends: first and last pipeline rank of this place, where they share a tensor (tied embeddings); alone elsewhere.
    """

    layout: Layout
    coordinates: Coordinates
    world: Group
    pp: Group
    replicate: Group
    shard: Group
    tp: Group
    kv_heads: Group = ALONE
    ends: Group = ALONE

    @staticmethod
    def alone() -> "Mesh":
        """The mesh of one process."""
        return Mesh(Layout(), Coordinates(0, 0, 0), ALONE, ALONE, ALONE, ALONE, ALONE)

    @staticmethod
    def build(layout: Layout, device_type: str, num_kv_heads: int, tied: bool = False) -> "Mesh":
        """Makes the groups; called by every rank of an initialised default process group.

        Args:
            tied: whether embedding and head are one tensor.

        Raises:
            ParallelError: the layout is not one of this many ranks.
        """
        if layout.world_size == 1 and not dist.is_initialized():
            return Mesh.alone()
        world = dist.get_world_size()
        if world != layout.world_size:
            raise ParallelError(
                f"pp x dp x tp = {layout.pp} x {layout.dp} x {layout.tp} = {layout.world_size} ranks, "
                f"but {world} were started."
            )
        group_size = layout.group_size
        shape = (layout.pp, layout.dp // group_size, group_size, layout.tp)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        rank = dist.get_rank()
        return Mesh(
            layout,
            layout.coordinates(rank),
            Group(dist.group.WORLD, rank, world),
            pp=_axis(mesh, "pp"),
            replicate=_axis(mesh, "dp_replicate"),
            shard=_axis(mesh, "dp_shard"),
            tp=_axis(mesh, "tp"),
            kv_heads=_neighbours(layout, rank, num_kv_heads),
            ends=_ends(layout, rank) if tied and layout.pp > 1 else ALONE,
        )


def _axis(mesh: DeviceMesh, name: str) -> Group:
    group = mesh.get_group(name)
    size = dist.get_world_size(group)
    return Group(group, dist.get_rank(group), size) if size > 1 else ALONE


def _neighbours(layout: Layout, rank: int, num_kv_heads: int) -> Group:
    size = layout.tp // num_kv_heads
    if size <= 1:
        return ALONE
    return _one_of([list(range(first, first + size)) for first in range(0, layout.world_size, size)], rank)


def _ends(layout: Layout, rank: int) -> Group:
    per_stage = layout.dp * layout.tp
    return _one_of([[place, place + (layout.pp - 1) * per_stage] for place in range(per_stage)], rank)


def _one_of(sets: list[list[int]], rank: int) -> Group:
    """This rank's group of disjoint sets; every rank makes every group, in the same order."""
    mine = ALONE
    for ranks in sets:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = Group(group, ranks.index(rank), len(ranks))
    return mine
