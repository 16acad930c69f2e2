"""Process groups by mesh axis, passed by hand to whoever communicates: there is no global group object."""

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from ..core.errors import ParallelError
from ..core.layout import Coordinates, Layout
from .local_link import Link, Switchboard


class Group:
    """The ranks that one communicates with along an axis.

    torch alone keeps the process group: once it is destroyed, by torch or by a user's script, its threads end, whatever
    still has a mesh. Threads that outlive the interpreter end the process with SIGABRT.

    Args:
        process_group: None where one is alone.
        link: a faster way for small messages between CPUs of one host.
    """

    __slots__ = ("_process_group", "link", "rank", "size")

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, rank: int = 0, size: int = 1, link: Link | None = None
    ) -> None:
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self.rank = rank
        self.size = size
        self.link = link

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's; None where one is alone.

        Raises:
            ParallelError: it was destroyed.
        """
        if self._process_group is None:
            return None
        process_group = self._process_group()
        if process_group is None:
            raise ParallelError("The process group of these ranks was destroyed: they cannot communicate any more.")
        return process_group


ALONE = Group()
_PATIENCE = 1800.0  # seconds
ONE_RANK = Layout()


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's groups along every axis of a layout.

    Attributes:
        replicate: ranks that hold the same optimizer shard (all of dp at ZeRO stage 0).
        shard: ranks over which one copy of the optimizer state is spread.
        kv_heads: ranks that hold the same kv heads, where tp exceeds their number.
        embedding_group: the first and the last pipeline rank of this place, where tied embeddings are held by both;
            ALONE elsewhere.
    """

    layout: Layout
    coordinates: Coordinates
    world: Group
    pp: Group
    replicate: Group
    shard: Group
    tp: Group
    kv_heads: Group = ALONE
    embedding_group: Group = ALONE

    @staticmethod
    def alone(layout: Layout = ONE_RANK) -> "Mesh":
        """The mesh of one process."""
        return Mesh(layout, Coordinates(0, 0, 0), ALONE, ALONE, ALONE, ALONE, ALONE)

    @staticmethod
    def build(
        layout: Layout,
        num_kv_heads: int,
        tied: bool = False,
        timeout_seconds: float = 600.0,
    ) -> "Mesh":
        """Makes the groups; called by every rank of an initialised default process group.

        Args:
            tied: whether embedding and head are one tensor.
            timeout_seconds: after which a rank that waits for another gives up; groups do not take over the default
                group's.

        Raises:
            ParallelError: the layout is not one of this many ranks.
        """
        if layout.world_size == 1 and not dist.is_initialized():
            return Mesh.alone(layout)
        world = dist.get_world_size()
        if world != layout.world_size:
            raise ParallelError(
                f"pp x dp x tp = {layout.pp} x {layout.dp} x {layout.tp} = {layout.world_size} ranks, "
                f"but {world} were started."
            )
        rank, timeout = dist.get_rank(), timedelta(seconds=timeout_seconds)
        group_size = layout.group_size
        places = np.arange(world).reshape(layout.pp, layout.dp // group_size, group_size, layout.tp)
        neighbours = places.reshape(-1, max(1, layout.tp // num_kv_heads))
        ends = places.reshape(layout.pp, -1)[[0, -1]].T if tied and layout.pp > 1 else places.reshape(-1, 1)
        by_axis = [np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis]) for axis in range(4)]
        with ExitStack() as stack:
            board = stack.enter_context(Switchboard(timeout_seconds)) if dist.get_backend() == "gloo" else None
            pp, replicate, shard, tp, kv_heads, last = (
                _one_of(sets, rank, timeout, board) for sets in (*by_axis, neighbours, ends)
            )
            link = board.link(range(world)) if board else None
        return Mesh(
            layout,
            layout.coordinates(rank),
            Group(dist.group.WORLD, rank, world, link),
            pp=pp,
            replicate=replicate,
            shard=shard,
            tp=tp,
            kv_heads=kv_heads,
            embedding_group=last,
        )


def join_world() -> Group:
    """The group of all ranks of an initialised default process group, for who needs no mesh."""
    with ExitStack() as stack:
        board = stack.enter_context(Switchboard(_PATIENCE)) if dist.get_backend() == "gloo" else None
        world = dist.get_world_size()
        return Group(dist.group.WORLD, dist.get_rank(), world, board.link(range(world)) if board else None)


def between_cpus(mesh: Mesh, timeout_seconds: float) -> Group:
    """The ranks of the shard group, for messages from CPU to CPU, which NCCL has not; every rank calls it."""
    if mesh.shard.size == 1 or dist.get_backend(mesh.shard.process_group) != "nccl":
        return mesh.shard
    layout = mesh.layout
    places = np.arange(layout.world_size).reshape(-1, layout.group_size, layout.tp)
    sets = np.moveaxis(places, 1, -1).reshape(-1, layout.group_size)
    return _one_of(sets, mesh.world.rank, timedelta(seconds=timeout_seconds), None, "gloo")


def _one_of(
    sets: npt.NDArray[np.int64], rank: int, timeout: timedelta, board: Switchboard | None, backend: str | None = None
) -> Group:
    """This rank's group of disjoint sets, a row each; every rank makes every group, in the same order."""
    mine = ALONE
    for ranks in sets.tolist() if sets.shape[1] > 1 else ():
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        link = board.link(ranks) if board else None
        if rank in ranks:
            mine = Group(group, ranks.index(rank), len(ranks), link)
    return mine
