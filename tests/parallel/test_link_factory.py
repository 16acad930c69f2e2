"""Links between ranks: they join ranks of one host alone, in the order of the group, and no stranger."""

import time

import pytest
import torch
import torch.distributed as dist

from tk.parallel import link_factory
from tk.parallel.collectives import all_reduce
from tk.parallel.link_factory import LinkFactory, host_identity
from tk.parallel.local_link import LinkLost
from tk.parallel.mesh import Group
from tk.tests.rank_pool import RankPool


def identify() -> str:
    """Returns this process's host identity."""
    assert host_identity() == host_identity()
    return host_identity().hex()


def test_processes_of_one_host_have_one_identity(rank_pool: RankPool) -> None:
    identities = rank_pool.run(identify, 2)
    assert identities == [host_identity().hex()] * 2
    assert len(host_identity()) == 16


def test_a_system_without_an_identity_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_factory, "_NAMESPACES", ("/proc/self/ns/none",))
    assert host_identity() != host_identity()
    assert len(host_identity()) == 16


def connect_some() -> list[list[int]]:
    """Connects ranks 2 and 0 of three, in this order, then all; returns the places of the peers in each link."""
    places = []
    with LinkFactory(timeout=20.0) as links:
        for ranks in ([2, 0], [0, 1, 2]):
            link = links.link(ranks)
            assert (link is None) == (links.rank not in ranks)
            places.append([] if link is None else sorted(link.connections))
            if link is not None:
                group = Group(dist.group.WORLD, ranks.index(links.rank), len(ranks), link)
                assert all_reduce(torch.tensor([float(links.rank)]), group).item() == sum(ranks)
    return places


def test_a_link_joins_the_ranks_of_its_group_alone(rank_pool: RankPool) -> None:
    assert rank_pool.run(connect_some, 3) == [[[0], [1, 2]], [[], [0, 2]], [[1], [0, 1]]]


def leave_late() -> list[float]:
    """Connects two ranks, of which rank 0 takes half a second longer; returns the time before and after it left."""
    with LinkFactory(timeout=20.0) as links:
        links.link([0, 1])
        if links.rank == 0:
            time.sleep(0.5)
        last = time.monotonic()
    return [last, time.monotonic()]


def test_ranks_leave_the_factory_together(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(leave_late, 2)
    assert second[1] >= first[0], "rank 1 left while rank 0 could still connect"


def connect_hosts() -> list[bool]:
    """Places rank 2 on another host; returns whether each of two groups has a link."""
    original = link_factory.host_identity
    link_factory.host_identity = lambda: bytes([dist.get_rank() // 2]) * 16
    try:
        with LinkFactory(timeout=20.0) as links:
            return [links.link(ranks) is not None for ranks in ([0, 1], [1, 2])]
    finally:
        link_factory.host_identity = original


def test_ranks_of_different_hosts_have_no_link(rank_pool: RankPool) -> None:
    assert rank_pool.run(connect_hosts, 3) == [[True, False], [True, False], [False, False]]


def wait_for_a_rank_that_does_not_connect() -> str:
    """Returns the error of rank 0, whose peer does not ask for the link."""
    with LinkFactory(timeout=0.1) as links:
        if links.rank == 1:
            return ""
        start = time.monotonic()
        with pytest.raises(LinkLost) as error:
            links.link([0, 1])
        assert time.monotonic() - start < 5
        return str(error.value)


def test_a_rank_that_does_not_connect_is_named(rank_pool: RankPool) -> None:
    message = rank_pool.run(wait_for_a_rank_that_does_not_connect, 2)[0]
    assert message.startswith("Rank 1 did not connect to rank 0 within 0.1 seconds.")


def connect_without_secret() -> bool:
    """Connects rank 1 to rank 0 with a wrong secret first, then with the right one; returns whether the link works."""
    with LinkFactory(timeout=20.0) as links:
        if links.rank == 1:
            record = links._records[0]
            links._records[0] = record[:32] + bytes(16)
            links._num_links += 1
            stranger = links._connect(0, 1)
            links._num_links -= 1
            links._records[0] = record
            link = links.link([0, 1])
            stranger.close()
        else:
            link = links.link([0, 1])
    assert link is not None
    return all_reduce(torch.ones(3), Group(dist.group.WORLD, links.rank, 2, link)).tolist() == [2.0] * 3


def test_a_connection_without_the_secret_is_refused(rank_pool: RankPool) -> None:
    assert rank_pool.run(connect_without_secret, 2) == [True, True]
