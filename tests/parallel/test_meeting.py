"""The meeting of all ranks: ranks of one host find each other, and groups of a user do not keep ranks apart."""

import hashlib
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tk.core.layout import Layout
from tk.parallel import meeting
from tk.parallel.collectives import all_reduce
from tk.parallel.host import host_group
from tk.parallel.local_link import LinkLost
from tk.parallel.meeting import Meeting, host_identity
from tk.parallel.mesh import Group, Mesh, join_world
from tk.tests.rank_pool import RankPool
from tk.train.health.flight_recorder import is_peer_loss


def identify() -> str:
    """Returns this process's host identity."""
    assert host_identity() == host_identity()
    return host_identity().hex()


def test_processes_of_one_host_have_one_identity(rank_pool: RankPool) -> None:
    identities = rank_pool.run(identify, 2)
    assert identities == [host_identity().hex()] * 2
    assert len(host_identity()) == 16


def test_a_system_without_an_identity_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_NAMESPACES", ("/proc/self/ns/none",))
    assert host_identity() != host_identity()
    assert len(host_identity()) == 16


def meet_twice() -> list[str]:
    """Returns the secrets of two meetings."""
    return [Meeting().secret.hex() for _ in range(2)]


def test_all_ranks_know_the_secret_of_one_meeting(rank_pool: RankPool) -> None:
    [(first, second), *others] = rank_pool.run(meet_twice, 3)
    assert first != second
    assert len(bytes.fromhex(first)) == 16
    assert others == [[first, second]] * 2


def meet_on_hosts() -> list[list[int]]:
    """Places rank 2 on another host; returns the ranks of this host, and those of its group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "host_identity", lambda: bytes([dist.get_rank() // 2]) * 16)
        group = host_group(Group(dist.group.WORLD, dist.get_rank(), 3), timeout=20.0)
        ranks = Meeting().host_ranks()
    assert group.rank == ranks.index(dist.get_rank())
    total = all_reduce(torch.tensor([dist.get_rank()]), group)
    return [ranks, [group.size, int(total)]]


def test_a_host_has_its_ranks(rank_pool: RankPool) -> None:
    assert rank_pool.run(meet_on_hosts, 3) == [[[0, 1], [2, 1]], [[0, 1], [2, 1]], [[2], [1, 2]]]


def group_before(later: bool) -> list[float]:
    """Makes groups of some ranks, then the groups of a layout and the host's; returns a sum over each.

    Args:
        later: whether groups are named as in later versions of torch: a group's number is that of the calls before it.
    """
    rank, c10d = dist.get_rank(), dist.distributed_c10d
    with pytest.MonkeyPatch.context() as patch:
        if later:
            patch.setattr(c10d, "_hash_ranks_to_str", _name_by_calls)
            patch.setattr(c10d, "_process_group_name", _count_and_name)
        dist.new_group([0])
        if rank in (1, 2):
            dist.new_group([1, 2], use_local_synchronization=True)
            if rank == 1:
                dist.new_group([1], use_local_synchronization=True)
        mesh = Mesh.build(Layout(pp=3), 4, tied=True, timeout_seconds=10)
        groups = (mesh.pp, mesh.embedding_group, join_world(), host_group(mesh.world, 10))
    return [all_reduce(torch.tensor([1.0]), group).item() for group in groups]


def _name_by_calls(ranks: list[int]) -> str:
    return hashlib.sha1(f"{ranks} {dist.distributed_c10d._world.group_count}".encode()).hexdigest()


def _count_and_name(ranks: list[int], use_hashed_name: bool) -> str:
    world = dist.distributed_c10d._world
    name = _name_by_calls(ranks) if use_hashed_name else str(world.group_count)
    world.group_count += 1
    return name


@pytest.mark.parametrize("later", [False, True])
def test_groups_that_a_user_made_before_keep_no_rank_waiting(rank_pool: RankPool, later: bool) -> None:
    assert rank_pool.run(group_before, 3, later=later) == [[3, 2, 3, 3], [3, 1, 3, 3], [3, 2, 3, 3]]


def miss_a_group() -> str:
    """Returns the error of rank 0, whose peer meets it, but hangs before it makes their group."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(dist, "new_group", lambda *arguments, **keywords: dist.barrier())
        with pytest.raises(LinkLost) as error:
            Mesh.build(Layout(tp=2), 2, timeout_seconds=1)
    if dist.get_rank() == 0:
        dist.barrier()
    assert is_peer_loss(error.value)
    return str(error.value)


def test_a_rank_that_does_not_make_its_group_is_a_lost_peer(rank_pool: RankPool) -> None:
    message = rank_pool.run(miss_a_group, 2)[0]
    assert message.startswith(
        "One of 2 ranks, 0 to 1, did not set up their process group with rank 0 within 1 seconds: it ended, or"
    )


def die_before_a_group() -> str:
    """Returns the error of rank 0, whose peer is killed between meeting and group."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Meeting, "host_ranks", lambda meeting: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RuntimeError) as error:
            Mesh.build(Layout(tp=2), 2, timeout_seconds=3600)  # longer than any test
    assert is_peer_loss(error.value)
    raise error.value


def test_a_rank_that_dies_is_a_lost_peer_at_once(rank_pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="exit code -9") as error:
        rank_pool.run(die_before_a_group, 2)
    assert "Connection closed by peer" in str(error.value) or "Connection reset by peer" in str(error.value)
