"""Links between ranks: they join ranks of one host alone, in the order of the group, and no stranger."""

import socket
import time

import pytest
import torch
import torch.distributed as dist

from tk.parallel import meeting
from tk.parallel.collectives import all_reduce
from tk.parallel.link_factory import _HELLO, LinkFactory
from tk.parallel.local_link import LinkLost
from tk.parallel.meeting import Meeting
from tk.parallel.mesh import Group
from tk.tests.rank_pool import RankPool


def connect_some() -> list[list[int]]:
    """Connects ranks 2 and 0 of three, in this order, then all; returns the places of the peers in each link."""
    places = []
    with LinkFactory(Meeting(), timeout=20.0) as links:
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
    with LinkFactory(Meeting(), timeout=20.0) as links:
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
    original = meeting.host_identity
    meeting.host_identity = lambda: bytes([dist.get_rank() // 2]) * 16
    try:
        with LinkFactory(Meeting(), timeout=20.0) as links:
            return [links.link(ranks) is not None for ranks in ([0, 1], [1, 2])]
    finally:
        meeting.host_identity = original


def test_ranks_of_different_hosts_have_no_link(rank_pool: RankPool) -> None:
    assert rank_pool.run(connect_hosts, 3) == [[True, False], [True, False], [False, False]]


def connect_one_way() -> bool:
    """Lets rank 1 not reach rank 0, which reaches rank 1; returns whether they have a link."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(LinkFactory, "_can_reach", lambda links, rank: rank != 0)
        with LinkFactory(Meeting(), timeout=20.0) as links:
            return links.link([0, 1]) is not None


def test_both_ranks_must_reach_each_other(rank_pool: RankPool) -> None:
    assert rank_pool.run(connect_one_way, 2) == [False, False]


def wait_for_a_rank_that_does_not_connect() -> str:
    """Returns the error of rank 0, whose peer does not ask for the link."""
    with LinkFactory(Meeting(), timeout=0.1) as links:
        if links.rank == 1:
            return ""
        with pytest.raises(LinkLost) as error:
            links.link([0, 1])
        return str(error.value)


def test_a_rank_that_does_not_connect_is_named(rank_pool: RankPool) -> None:
    message = rank_pool.run(wait_for_a_rank_that_does_not_connect, 2)[0]
    assert message.startswith("Rank 1 did not connect to rank 0 within 0.1 seconds.")


def connect_without_secret() -> bool:
    """Connects rank 1 to rank 0 with a wrong secret first, then with the right one; returns whether the link works."""
    with LinkFactory(Meeting(), timeout=20.0) as links:
        if links.rank == 1:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(links._address(0))
                stranger.sendall(_HELLO.pack(bytes(16), 1, 1))
                link = links.link([0, 1])
        else:
            link = links.link([0, 1])
    assert link is not None
    return all_reduce(torch.ones(3), Group(dist.group.WORLD, links.rank, 2, link)).tolist() == [2.0] * 3


def test_a_connection_without_the_secret_is_refused(rank_pool: RankPool) -> None:
    assert rank_pool.run(connect_without_secret, 2) == [True, True]
