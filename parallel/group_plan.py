"""The groups of one rank in a layout, as plain data: the ranks of each, and the work to make all of them at start.

In a group are the ranks that differ in one of their numbers only. Ranks are numbered in two ways: as holders of what
every token uses, pp x replicate x shard x tp where replicate x shard = dp x cp; and as holders of single experts, pp x
expert_replicate x expert_shard x ep x expert_tp. An example: the ranks of one stage at dp 2, cp 2, tp 2, ep 4,
expert_tp 1, ZeRO stage 1 with a shard_size of 2, and the groups of rank 0:

              tp 0  tp 1                 ep 0  ep 1  ep 2  ep 3        pp         0      tp         0 1
    dp 0 cp 0    0     1        edp 0       0     1     2     3        replicate  0 4    cp         0 2
         cp 1    2     3        edp 1       4     5     6     7        shard      0 2    ep         0 1 2 3
    dp 1 cp 0    4     5                                               expert_replicate  0 4
         cp 1    6     7                                               expert_shard      0

Groups are made by their members only. Axes whose groups have equal ranks share one group, here replicate and
expert_replicate, but not shard and cp: the exchange of buckets orders the operations of one, the layers those of the
other.

In every round each rank makes one group, alone if it must: torch names a group after its ranks and after the number of
groups that the rank has made before, so members with different numbers would wait for each other for ever.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ..core.layout import Layout

Axis: TypeAlias = Literal[
    "pp",
    "replicate",
    "shard",
    "expert_replicate",
    "expert_shard",
    "embedding_group",
    "tp",
    "cp",
    "ep",
    "expert_tp",
    "kv_heads",
]
# Who orders the operations of a group. Axes whose groups have the same ranks share one group only within an order:
# messages of one group are matched by their order, and buckets are exchanged while layers are computed.
_ORDERS: Final[dict[str, tuple[Axis, ...]]] = {
    "the schedule of the pipeline": ("pp",),
    "the exchange of buckets": ("replicate", "shard", "expert_replicate", "expert_shard", "embedding_group"),
    "the layers": ("tp", "cp", "ep", "expert_tp", "kv_heads"),
}
_ORDER_OF: Final = {axis: order for order, axes in _ORDERS.items() for axis in axes}


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group that a rank makes together with the group's other members.

    Attributes:
        ranks: the global ranks of the group, ascending.
        axes: the axes of the mesh along which it is this rank's group.
    """

    ranks: tuple[int, ...]
    axes: tuple[Axis, ...]


def plan_groups(layout: Layout, num_kv_heads: int, tied: bool, rank: int) -> tuple[PlannedGroup, ...]:
    """Returns the groups that a rank makes, in order: one for each round, in which all ranks of the world make one.

    Args:
        layout: the numbers of ranks along each axis.
        num_kv_heads: the number of kv heads of the whole model.
        tied: whether embedding and head are one tensor.
        rank: the rank that makes them, by its number in the world.
    """
    found: dict[tuple[str, tuple[int, ...]], list[Axis]] = {}
    for axis, ranks in _ranks_by_axis(layout, num_kv_heads, tied, rank):
        found.setdefault((_ORDER_OF[axis], ranks), []).append(axis)
    return tuple(PlannedGroup(ranks, tuple(axes)) for (_, ranks), axes in found.items())


def _ranks_by_axis(layout: Layout, num_kv_heads: int, tied: bool, rank: int) -> Iterable[tuple[Axis, tuple[int, ...]]]:
    """Yields the ranks of each of a rank's groups; no axis along which every rank of the world is alone."""
    dense, experts = layout.dense, layout.experts
    copy, expert_rank = dense.tp * dense.group_size, experts.tp * experts.ep
    strides: dict[Axis, tuple[int, int]] = {  # the distance of neighbours along an axis, and the number of ranks
        "pp": (layout.stage_size, layout.pp),
        "replicate": (copy, dense.num_copies),
        "shard": (dense.tp, dense.group_size),
        "tp": (1, dense.tp),
        "kv_heads": (1, max(1, dense.tp // num_kv_heads)),
        "cp": (dense.tp, layout.cp),
        "expert_replicate": (expert_rank * experts.group_size, experts.num_copies),
        "expert_shard": (expert_rank, experts.group_size),
        "ep": (experts.tp, experts.ep),
        "expert_tp": (1, experts.tp),
    }
    for axis, (stride, size) in strides.items():
        if size > 1:
            first = rank - rank // stride % size * stride
            yield axis, tuple(range(first, first + size * stride, stride))
    if tied and layout.pp > 1:
        stride, pp = layout.stage_size, layout.coordinates(rank).pp
        first = rank - pp * stride
        yield "embedding_group", (first, first + (layout.pp - 1) * stride) if pp in (0, layout.pp - 1) else (rank,)


@dataclass(frozen=True, slots=True)
class StartWork:
    """The work of one rank to make its groups over gloo, beside that of torch within a group.

    Attributes:
        groups: the process groups that it makes.
        collectives: the collectives of all ranks: to meet, to know that all listen and have probed, to leave together.
        requests: the requests to the store.
        probes: the connections that try whether a rank of the host can be reached.
        connections: the sockets of its links.
    """

    groups: int
    collectives: int
    requests: int
    probes: int
    connections: int


def start_work(plan: Iterable[PlannedGroup], world: range, host: range) -> StartWork:
    """Returns the work of a rank at start.

    Args:
        plan: the groups of the rank.
        world: the ranks of the run.
        host: the ranks of the rank's host.
    """
    sets = [group.ranks for group in plan]
    linked = [ranks for ranks in (*sets, world) if all(rank in host for rank in (ranks[0], ranks[-1]))]
    return StartWork(
        groups=len(sets),
        collectives=4,
        requests=4 + len(host) + len(host) - 1,
        probes=len(host) - 1,
        connections=sum(len(ranks) - 1 for ranks in linked),
    )
