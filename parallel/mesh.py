"""Process groups along the axes of a mesh; callers pass them on as arguments, and none is global."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..core.errors import ParallelError
from ..core.families import TensorFamily
from ..core.home_process import HomeProcess
from ..core.layout import Layout
from ..core.places import Coordinates
from .group_plan import PlannedGroup, plan_groups
from .link_factory import LinkFactory
from .local_link import Link, LinkLost
from .meeting import Meeting


class Group:
    """A set of ranks that communicate with each other, from the side of one of them.

    Only torch holds the process group, and this object a weak reference: when torch or a user's script destroys the
    group, its threads must end. A thread that outlives the interpreter ends the process with SIGABRT.

    Args:
        process_group: torch's process group, or None for a group of one rank.
        rank: this rank's index in the group.
        size: the number of ranks in the group.
        link: sockets that carry small messages between CPU ranks of one host faster than gloo.
    """

    __slots__ = ("_home", "_link", "_process_group", "rank", "size")

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, rank: int = 0, size: int = 1, link: Link | None = None
    ) -> None:
        self._home = HomeProcess("This process group")
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self.rank = rank
        self.size = size
        self._link = link

    @property
    def link(self) -> Link | None:
        """The sockets to the other ranks, if they are CPUs of one host.

        Raises:
            ConfigError: another process made the group.
        """
        if self._link is not None:
            self._home.require()
        return self._link

    @property
    def over_gloo(self) -> bool:
        """Whether messages go over gloo: those of GPU tensors then go through copies on the host."""
        process_group = self.process_group
        return process_group is not None and dist.get_backend(process_group) == "gloo"

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's process group, or None for a group of one rank.

        Raises:
            ParallelError: the process group was destroyed.
            ConfigError: another process made it: messages of a fork would mix with those of the rank.
        """
        if self._process_group is None:
            return None
        self._home.require()
        process_group = self._process_group()
        if process_group is None:
            raise ParallelError(
                "torch.distributed's process group was destroyed, so this rank cannot communicate any more: call "
                "destroy_process_group() only after the last use of tk."
            )
        return process_group


ALONE = Group()
_TIMEOUT = 1800.0  # seconds that a rank waits for another in the group of `join_world`
ONE_RANK = Layout()


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's groups along every axis of a layout.

    Attributes:
        layout: the numbers of ranks along each axis.
        coordinates: this rank's index along each axis.
        world: all ranks.
        pp: the stages of this rank's pipeline.
        replicate: the ranks that hold the same optimizer shard (all of dp x cp at ZeRO stage 0).
        shard: the ranks over which one copy of the optimizer state is sharded.
        tp: the ranks that share this rank's layers.
        cp: the ranks that share this rank's rows; each computes some of their positions.
        ep: the ranks that hold different experts and exchange tokens.
        expert_tp: the ranks that share this rank's experts.
        expert_replicate, expert_shard: as `replicate` and `shard`, for the optimizer states of experts.
        kv_heads: the ranks that hold the same kv heads, if tp exceeds the number of kv heads; else ALONE.
        embedding_group: the first and the last stage of this rank's pipeline, if both hold the tied embedding and this
            rank is one of them; else ALONE.
    """

    layout: Layout
    coordinates: Coordinates
    world: Group
    pp: Group
    replicate: Group
    shard: Group
    tp: Group
    cp: Group = ALONE
    ep: Group = ALONE
    expert_tp: Group = ALONE
    expert_replicate: Group = ALONE
    expert_shard: Group = ALONE
    kv_heads: Group = ALONE
    embedding_group: Group = ALONE

    def sharers(self, family: TensorFamily) -> tuple[Group, Group]:
        """Returns the ranks over which the buckets of a family are sharded, and those that update the same range."""
        groups = {
            "dense": (self.shard, self.replicate),
            "experts": (self.expert_shard, self.expert_replicate),
        }
        return groups[family.name]

    def cutters(self, family: TensorFamily) -> Group:
        """Returns the ranks that cut the tensors of a family among them."""
        return {"dense": self.tp, "experts": self.expert_tp}[family.name]

    @staticmethod
    def alone(layout: Layout = ONE_RANK) -> "Mesh":
        """Returns the mesh of one process, in which every group is ALONE."""
        return Mesh(layout, layout.coordinates(0), ALONE, ALONE, ALONE, ALONE, ALONE)

    @staticmethod
    def build(
        layout: Layout,
        num_kv_heads: int,
        tied: bool = False,
        timeout_seconds: float = 600.0,
    ) -> "Mesh":
        """Creates the groups of all axes; every rank of an initialised default process group calls it.

        Over gloo, it returns after every rank has its groups.

        Args:
            layout: the numbers of ranks along each axis.
            num_kv_heads: the number of kv heads of the whole model.
            tied: whether embedding and head are one tensor.
            timeout_seconds: the seconds after which a rank that waits for another gives up; torch does not take over
                the default group's timeout.

        Raises:
            ParallelError: the layout has another number of ranks than the default process group.
        """
        if layout.world_size == 1 and not dist.is_initialized():
            return Mesh.alone(layout)
        world = dist.get_world_size()
        if world != layout.world_size:
            raise ParallelError(
                f"The layout pp x dp x cp x tp = {layout.pp} x {layout.dp} x {layout.cp} x {layout.tp} needs "
                f"{layout.world_size} ranks, but {world} were started."
            )
        rank, meeting = dist.get_rank(), Meeting()
        found: dict[str, Group] = dict.fromkeys(("pp", "replicate", "shard", "tp"), ALONE)
        with ExitStack() as stack:
            links = None
            if dist.get_backend() == "gloo":
                links = stack.enter_context(LinkFactory(meeting, timeout_seconds))
            for planned in plan_groups(layout, num_kv_heads, tied, rank):
                found |= _make(planned, rank, timeout_seconds, links)
            link = links.link(range(world)) if links else None
        return Mesh(
            layout,
            layout.coordinates(rank),
            Group(dist.group.WORLD, rank, world, link),
            **found,
        )


def join_world() -> Group:
    """Returns the group of all ranks without a mesh; every rank of an initialised default process group calls it."""
    with ExitStack() as stack:
        links = stack.enter_context(LinkFactory(Meeting(), _TIMEOUT)) if dist.get_backend() == "gloo" else None
        world = dist.get_world_size()
        return Group(dist.group.WORLD, dist.get_rank(), world, links.link(range(world)) if links else None)


def cpu_shard_group(mesh: Mesh, timeout_seconds: float) -> Group:
    """Returns a gloo group of the shard group's ranks, for CPU tensors, which NCCL cannot send; every rank calls it.

    It is the shard group itself if that one is not NCCL's.
    """
    if mesh.shard.size == 1 or dist.get_backend(mesh.shard.process_group) != "nccl":
        return mesh.shard
    planned = next(each for each in plan_groups(mesh.layout, 1, False, mesh.world.rank) if "shard" in each.axes)
    return _make(planned, mesh.world.rank, timeout_seconds, None, "gloo")["shard"]


@contextmanager
def _unbound() -> Iterator[None]:
    """A context in which the default process group names no device.

    If it names one, torch splits new groups off its communicator, for which NCCL waits until every rank has come; here
    only the members of a group come.
    """
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _make(
    planned: PlannedGroup, rank: int, timeout_seconds: float, links: LinkFactory | None, backend: str | None = None
) -> dict[str, Group]:
    """Makes a group together with its other members; returns it by axis, or ALONE if it has one member.

    Raises:
        LinkLost: a member did not come within the timeout.
    """
    ranks, timeout = planned.ranks, timedelta(seconds=timeout_seconds)
    try:
        with _unbound():
            made = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    except RuntimeError as error:  # a file as the store, unlike a server, has no class of its own for it
        if "timeout" not in str(error).lower():
            raise
        raise LinkLost(
            f"One of {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}, did not set up their process group with rank "
            f"{rank} within {timeout_seconds:g} seconds: it ended, or has not reached the set-up. ({error})"
        ) from error
    link = links.link(ranks) if links else None
    one = len(ranks) == 1
    return {axis: ALONE if one else Group(made, ranks.index(rank), len(ranks), link) for axis in planned.axes}
