"""The plan of groups: all ranks of the world agree on it, and the work at start does not grow with the world."""

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore

from tk.core.layout import Layout
from tk.parallel.group_plan import PlannedGroup, StartWork, plan_groups, start_work
from tk.parallel.link_factory import LinkFactory
from tk.parallel.mesh import Mesh
from tk.tests.rank_pool import RankPool

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shards = draw(SIZES)
    replicas = draw(SIZES)
    tp, pp, cp, zero = draw(SIZES), draw(SIZES), draw(st.sampled_from([1, 2])), draw(st.sampled_from([0, 2]))
    return Layout(tp, pp, shards * replicas, cp, shard_size=shards, zero=zero)


@settings(deadline=None)
@given(layouts(), st.sampled_from([1, 2, 4]), st.booleans())
def test_every_round_cuts_the_world_into_groups(layout: Layout, num_kv_heads: int, tied: bool) -> None:
    plans = [plan_groups(layout, num_kv_heads, tied, rank) for rank in range(layout.world_size)]
    for groups in zip(*plans, strict=True):
        assert len({group.axes for group in groups}) == 1, "ranks make groups of different axes in one round"
        for rank, group in enumerate(groups):
            assert rank in group.ranks
            assert list(group.ranks) == sorted(set(group.ranks))
            assert all(groups[other] == group for other in group.ranks), "members disagree about their group"


def test_equal_ranks_share_a_group_only_if_one_order_rules_them() -> None:
    both = (PlannedGroup((0, 1, 2, 3), ("tp", "kv_heads")),)
    assert plan_groups(Layout(tp=4), 1, False, 2) == both, "each layer uses both in turn"
    apart = (PlannedGroup((0, 1), ("pp",)), PlannedGroup((0, 1), ("embedding_group",)))
    assert plan_groups(Layout(pp=2), 4, True, 0) == apart, "the schedule's messages are not those of buckets"


def test_the_work_at_start_does_not_grow_with_the_world() -> None:
    works, sizes = [], []
    for dp in (16, 128):
        layout = Layout(tp=4, pp=8, dp=dp, zero=2, shard_size=8)
        world = range(layout.world_size)
        plans = [plan_groups(layout, 2, True, rank) for rank in world]
        hosts = [range(rank - rank % 8, rank - rank % 8 + 8) for rank in world]
        sizes.append(len(world))
        works.append({start_work(plan, world, host) for plan, host in zip(plans, hosts, strict=True)})
    assert sizes == [512, 4096]
    assert works[0] == works[1] == {StartWork(groups=6, collectives=4, requests=19, probes=7, connections=4)}


def count_work() -> list[Any]:
    """Builds a mesh; returns the work that was planned, and the work that was done."""
    layout, rank, done = Layout(tp=2, pp=2, dp=2, zero=1), dist.get_rank(), dict.fromkeys(WORK, 0)

    def count(patch: pytest.MonkeyPatch, owner: object, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            done[kind] += 1
            return original(*arguments, **keywords)

        patch.setattr(owner, name, counted)

    with pytest.MonkeyPatch.context() as patch:
        count(patch, dist, "new_group", "groups")
        for name in ("all_reduce", "barrier", "all_gather", "broadcast"):
            count(patch, dist, name, "collectives")
        for name in ("set", "get", "add"):
            count(patch, PrefixStore, name, "requests")
        count(patch, LinkFactory, "_can_reach", "probes")
        for name in ("_connect", "_accept"):
            count(patch, LinkFactory, name, "connections")
        Mesh.build(layout, 2, True, timeout_seconds=60)
    planned = start_work(plan_groups(layout, 2, True, rank), range(8), range(8))
    return [{kind: getattr(planned, kind) for kind in WORK}, done]


WORK = StartWork.__slots__


def test_the_work_is_the_planned_one(rank_pool: RankPool) -> None:
    for planned, done in rank_pool.run(count_work, 8):
        assert planned == done
