"""The plan of groups: all ranks of the world agree on it, and the work at start does not grow with the world."""

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import assume, given, settings
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
    """Draws a layout of at most 96 ranks; in its stages, ep and expert_tp have any sizes that fit."""
    tp, pp, dp, cp = (draw(SIZES) for _ in range(4))
    assume(tp * pp * dp * cp <= 96)
    ep = draw(st.sampled_from(_divisors(dp * cp * tp)))
    expert_tp = draw(st.sampled_from(_divisors(dp * cp * tp // ep)))
    shard_size, zero = draw(st.sampled_from(_divisors(dp * cp))), draw(st.sampled_from([0, 2]))
    return Layout(tp, pp, dp, cp, ep=ep, expert_tp=expert_tp, shard_size=shard_size, zero=zero)


def _divisors(size: int) -> list[int]:
    return [number for number in range(1, size + 1) if size % number == 0]


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


def _numbers(layout: Layout, rank: int) -> dict[str, dict[str, int]]:
    """Returns a rank's numbers in both ways of counting, and those of its rows, by axis."""
    at, dense, experts = layout.coordinates(rank), layout.dense.place(rank), layout.experts.place(rank)
    return {
        "dense": {"pp": at.pp, "replicate": dense.copy, "shard": dense.member, "tp": dense.tp},
        "rows": {"pp": at.pp, "dp": at.dp, "cp": at.cp, "tp": at.tp},
        "experts": {
            "pp": at.pp,
            "expert_replicate": experts.copy,
            "expert_shard": experts.member,
            "ep": experts.ep,
            "expert_tp": experts.tp,
        },
    }


@settings(deadline=None)
@given(layouts())
def test_the_ranks_of_a_group_differ_in_one_number_alone(layout: Layout) -> None:
    world = [_numbers(layout, rank) for rank in range(layout.world_size)]
    for rank in range(0, layout.world_size, 5):
        found: dict[str, tuple[int, ...]] = {}
        for group in plan_groups(layout, 64, False, rank):
            found |= dict.fromkeys(group.axes, group.ranks)
        for way, mine in world[rank].items():
            for axis in set(mine) - {"dp"}:
                others = [key for key in mine if key != axis]
                alike = [each for each, numbers in enumerate(world) if all(numbers[way][o] == mine[o] for o in others)]
                assert list(found.get(axis, (rank,))) == alike, axis


def test_equal_ranks_share_a_group_only_if_one_order_rules_them() -> None:
    both = (PlannedGroup((0, 1, 2, 3), ("tp", "kv_heads", "expert_tp")),)
    assert plan_groups(Layout(tp=4), 1, False, 2) == both, "each layer uses both in turn"
    experts = plan_groups(Layout(dp=2, cp=2, tp=2, ep=4, shard_size=2, zero=1), 2, False, 0)
    assert {group.axes: group.ranks for group in experts} == {
        ("replicate", "expert_replicate"): (0, 4),
        ("shard",): (0, 2),
        ("tp",): (0, 1),
        ("cp",): (0, 2),
        ("ep",): (0, 1, 2, 3),
    }
    assert plan_groups(Layout(dp=4, zero=2), 2, False, 0) == (PlannedGroup((0, 1, 2, 3), ("shard", "expert_shard")),)
    apart = (PlannedGroup((0, 1), ("pp",)), PlannedGroup((0, 1), ("embedding_group",)))
    assert plan_groups(Layout(pp=2), 4, True, 0) == apart, "the schedule's messages are not those of buckets"


def test_the_work_at_start_does_not_grow_with_the_world() -> None:
    works, sizes = [], []
    for dp in (16, 128):
        layout = Layout(tp=4, pp=8, dp=dp // 2, cp=2, ep=8, zero=2, shard_size=8)
        world = range(layout.world_size)
        plans = [plan_groups(layout, 2, True, rank) for rank in world]
        hosts = [range(rank - rank % 8, rank - rank % 8 + 8) for rank in world]
        sizes.append(len(world))
        works.append({start_work(plan, world, host) for plan, host in zip(plans, hosts, strict=True)})
    assert sizes == [512, 4096]
    assert works[0] == works[1] == {StartWork(groups=9, collectives=4, requests=19, probes=7, connections=12)}


def count_work() -> list[Any]:
    """Builds a mesh; returns the work that was planned, and the work that was done."""
    layout, rank, done = Layout(tp=2, pp=2), dist.get_rank(), dict.fromkeys(WORK, 0)

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
    planned = start_work(plan_groups(layout, 2, True, rank), range(4), range(4))
    return [{kind: getattr(planned, kind) for kind in WORK}, done]


WORK = StartWork.__slots__


def test_the_work_is_the_planned_one(rank_pool: RankPool) -> None:
    for planned, done in rank_pool.run(count_work, 4):
        assert planned == done
