"""The groups of a mesh: their ranks along every axis, counted by hand."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tk.core.errors import ParallelError
from tk.core.families import TensorFamily
from tk.core.layout import Layout
from tk.core.places import Coordinates
from tk.parallel.collectives import all_gather
from tk.parallel.mesh import ALONE, Group, Mesh, cpu_shard_group, join_world
from tk.tests.rank_pool import RankPool

AXES = tuple(slot for slot in Mesh.__slots__ if slot not in ("layout", "coordinates"))
EVERY = [[0, 1, 2, 3]] * 4
EACH = [[0], [1], [2], [3]]
NEIGHBOURS = [[0, 1], [0, 1], [2, 3], [2, 3]]
APART = [[0, 2], [1, 3], [0, 2], [1, 3]]


def members(layout: dict[str, Any], num_kv_heads: int, tied: bool) -> dict[str, list[int]]:
    """Returns the global ranks of this rank's group along each axis."""
    mesh = Mesh.build(Layout(**layout), num_kv_heads, tied, timeout_seconds=60)
    assert mesh.coordinates == Layout(**layout).coordinates(dist.get_rank())
    assert cpu_shard_group(mesh, 60) is mesh.shard, "gloo sends CPU tensors itself"
    me = torch.tensor(dist.get_rank())
    found = {}
    for axis in AXES:
        group: Group = getattr(mesh, axis)
        found[axis] = [int(rank) for rank in all_gather(me, group)]
        assert found[axis][group.rank] == me, "a group's ranks are in the order of global ranks"
    return found


@pytest.mark.parametrize(
    ("layout", "num_kv_heads", "tied", "expected"),
    [
        ({"tp": 4}, 2, True, {"tp expert_tp": EVERY, "kv_heads": NEIGHBOURS}),
        ({"tp": 2, "dp": 2, "zero": 0}, 4, False, {"tp expert_tp": NEIGHBOURS, "replicate expert_replicate": APART}),
        ({"tp": 2, "dp": 2, "zero": 1}, 4, False, {"tp expert_tp": NEIGHBOURS, "shard expert_shard": APART}),
        (
            {"dp": 4, "zero": 3, "shard_size": 2},
            4,
            False,
            {"shard expert_shard": NEIGHBOURS, "replicate expert_replicate": APART},
        ),
        (
            {"cp": 2, "tp": 2},
            4,
            False,
            {"cp": APART, "tp expert_tp": NEIGHBOURS, "replicate expert_replicate": APART},
        ),
        ({"dp": 2, "cp": 2, "zero": 2}, 4, False, {"cp": NEIGHBOURS, "shard expert_shard": EVERY}),
        ({"pp": 2, "tp": 2}, 4, False, {"pp": APART, "tp expert_tp": NEIGHBOURS}),
        ({"pp": 2, "tp": 2}, 4, True, {"pp": APART, "tp expert_tp": NEIGHBOURS, "embedding_group": APART}),
        ({"pp": 4}, 4, True, {"pp": EVERY, "embedding_group": [[0, 3], [1], [2], [0, 3]]}),
        (
            {"cp": 2, "dp": 2, "zero": 1, "shard_size": 2, "ep": 2},
            4,
            False,
            {"cp shard ep": NEIGHBOURS, "replicate expert_replicate": APART},
        ),
        (
            {"cp": 2, "tp": 2, "zero": 2, "ep": 2, "expert_tp": 2},
            4,
            False,
            {"tp expert_tp": NEIGHBOURS, "cp shard ep": APART},
        ),
        ({"tp": 2, "dp": 2, "ep": 4}, 4, False, {"tp": NEIGHBOURS, "replicate": APART, "ep": EVERY}),
    ],
)
def test_every_axis_has_its_ranks(
    rank_pool: RankPool, layout: dict[str, Any], num_kv_heads: int, tied: bool, expected: dict[str, list[list[int]]]
) -> None:
    found = rank_pool.run(members, 4, layout=layout, num_kv_heads=num_kv_heads, tied=tied)
    by_axis = {axis: ranks for axes, ranks in expected.items() for axis in axes.split()}
    for axis in AXES:
        wanted = by_axis.get(axis, EVERY if axis == "world" else EACH)
        assert [rank[axis] for rank in found] == wanted, axis


def build_for_too_many() -> str:
    """Returns the error of a layout that needs more ranks than there are."""
    with pytest.raises(ParallelError) as error:
        Mesh.build(Layout(tp=4, dp=2), 4)
    with pytest.raises(ParallelError, match="pp x dp x cp x tp = 1 x 1 x 3 x 1 needs 3 ranks"):
        Mesh.build(Layout(cp=3), 4)
    return str(error.value)


def sharers_of_experts() -> list[int]:
    """Returns the sizes of the groups that share dense tensors, and experts."""
    mesh = Mesh.build(Layout(tp=2, dp=2, ep=2, zero=1), 2, timeout_seconds=60)
    assert mesh.sharers(TensorFamily("experts", {})) == (mesh.expert_shard, mesh.expert_replicate)
    assert mesh.sharers(TensorFamily("dense", {})) == (mesh.shard, mesh.replicate)
    return [mesh.shard.size, mesh.replicate.size, mesh.expert_shard.size, mesh.expert_replicate.size]


def test_experts_have_sharers_of_their_own(rank_pool: RankPool) -> None:
    assert rank_pool.run(sharers_of_experts, 4) == [[2, 1, 2, 1]] * 4


def test_a_layout_of_another_number_of_ranks_is_refused(rank_pool: RankPool) -> None:
    message = "The layout pp x dp x cp x tp = 1 x 2 x 1 x 4 needs 8 ranks, but 2 were started."
    assert rank_pool.run(build_for_too_many, 2) == [message] * 2


def count_world() -> list[int]:
    """Returns rank, size and the sum of all ranks in the group without a mesh."""
    world = join_world()
    return [world.rank, world.size, sum(int(rank) for rank in all_gather(torch.tensor(world.rank), world))]


def test_a_world_needs_no_layout(rank_pool: RankPool) -> None:
    assert rank_pool.run(count_world, 3) == [[0, 3, 3], [1, 3, 3], [2, 3, 3]]


def build_with_a_bound_device() -> list[str]:
    """Builds a mesh of four ranks in a world that names a device; returns the device that it then names."""
    new_group, world, seen = dist.new_group, dist.group.WORLD, []
    assert world is not None

    def noted(*arguments: Any, **keywords: Any) -> Any:
        seen.append(world.bound_device_id)
        return new_group(*arguments, **keywords)

    world.bound_device_id = torch.device("cpu", dist.get_rank())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", noted)
            Mesh.build(Layout(pp=2, dp=2), 4, timeout_seconds=60)
        assert seen
        assert not any(seen), "torch would split groups off, for which every rank must come"
        return [str(world.bound_device_id)]
    finally:
        world.bound_device_id = None


def test_groups_are_not_split_off_a_world_that_names_its_device(rank_pool: RankPool) -> None:
    assert rank_pool.run(build_with_a_bound_device, 4) == [[f"cpu:{rank}"] for rank in range(4)]


def destroy(store: str) -> list[int]:
    """Builds a mesh and destroys its groups; returns the number of threads without them, with them, and after them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a peer that still connects must not find this group closed
    dist.destroy_process_group()
    counts = [_num_threads()]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = Mesh.build(Layout(pp=4), 4, tied=True, timeout_seconds=60)
    counts.append(_num_threads())
    dist.barrier()
    dist.destroy_process_group()
    counts.append(_num_threads())
    with pytest.raises(ParallelError, match="was destroyed"):
        _ = mesh.pp.process_group
    dist.init_process_group("gloo", init_method=f"file://{store}.last", rank=rank, world_size=size)
    return counts


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_threads_end_with_the_groups(rank_pool: RankPool, tmp_path: Path) -> None:
    for before, during, after in rank_pool.run(destroy, 4, store=str(tmp_path / "store")):
        assert before == after < during


def test_one_process_needs_no_process_group() -> None:
    mesh = Mesh.build(Layout(zero=2), num_kv_heads=4, tied=True)
    assert mesh == Mesh.alone(Layout(zero=2))
    assert mesh.coordinates == Coordinates(pp=0, dp=0, cp=0, tp=0)
    assert all(getattr(mesh, axis) is ALONE for axis in AXES)
    assert (ALONE.rank, ALONE.size, ALONE.process_group, ALONE.link) == (0, 1, None, None)


def test_a_process_group_that_was_destroyed_is_named() -> None:
    class ProcessGroup:
        pass

    alive: Any = ProcessGroup()
    group = Group(alive, 1, 2)
    assert group.process_group is alive
    del alive
    with pytest.raises(ParallelError, match=r"process group was destroyed.*only after the last use of tk"):
        _ = group.process_group
