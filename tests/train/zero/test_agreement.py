"""The agreement of two ranks, both in this process: acts are compared, and exchanges start after a common count."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tk.core.errors import TkError
from tk.parallel.local_link import BlockedConnections, Connection, Link
from tk.parallel.mesh import ALONE, Group
from tk.train.zero.agreement import Act, Agreement


class Rank:
    """A rank with an agreement.

    Attributes:
        num_complete: the number of its complete buckets, which a test sets.
        started: the argument of every call that starts exchanges.
    """

    def __init__(self, group: Group) -> None:
        self.num_complete = 0
        self.started: list[int] = []
        self.agreement = Agreement(group, ["embed", "block"], lambda: self.num_complete, self.started.append)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank]]:
    """Ranks 4 and 6 of a job, which form a group; a message waits in its socket until its receiver reads it."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 6])
    ends, blocked = socket.socketpair(), BlockedConnections(5.0)
    links = [Link({1 - rank: Connection(ends[rank], f"rank {1 - rank}", blocked)}) for rank in range(2)]
    yield Rank(Group(None, 0, 2, links[0])), Rank(Group(None, 1, 2, links[1]))
    for end in ends:
        end.close()


def announce(ranks: tuple[Rank, Rank], act: Act, unit: int = 0) -> None:
    for rank in ranks:
        rank.agreement.announce(act, unit)


def test_equal_acts_are_confirmed(ranks: tuple[Rank, Rank]) -> None:
    announce(ranks, Act.FORWARD, 1)
    announce(ranks, Act.BACKWARD, 0)
    for rank in ranks:
        rank.agreement.confirm()
        rank.agreement.confirm()  # nothing is left to wait for


def test_exchanges_start_with_the_smallest_count_of_the_message_before(ranks: tuple[Rank, Rank]) -> None:
    ranks[0].num_complete, ranks[1].num_complete = 3, 1
    announce(ranks, Act.BACKWARD, 1)
    assert [rank.started for rank in ranks] == [[0], [0]], "no message has named a complete bucket yet"
    ranks[0].num_complete = ranks[1].num_complete = 4
    announce(ranks, Act.BACKWARD, 0)
    assert [rank.started for rank in ranks] == [[0, 1], [0, 1]]
    announce(ranks, Act.UPDATE)
    assert [rank.started for rank in ranks] == [[0, 1, 4], [0, 1, 4]]


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ((Act.FORWARD, 0), (Act.FORWARD, 1), "rank 4 gathers embed for a forward pass; rank 6 gathers block for a fo"),
        ((Act.READ, 1), (Act.BACKWARD, 1), "rank 4 gathers block to be read; rank 6 gathers block for a backward pass"),
        ((Act.UPDATE, 0), (Act.END_FORWARD, 0), "rank 4 has reached an optimizer step; rank 6 has ended a forward"),
    ],
)
def test_different_acts_are_an_error_on_every_rank_from_then_on(
    ranks: tuple[Rank, Rank], mine: tuple[Act, int], other: tuple[Act, int], said: str
) -> None:
    ranks[0].agreement.announce(*mine)
    ranks[1].agreement.announce(*other)
    for rank in ranks:
        with pytest.raises(TkError, match=said):
            rank.agreement.confirm()
        with pytest.raises(TkError, match=said):
            rank.agreement.announce(Act.FORWARD)
        assert rank.started == [0], "no exchange starts after a disagreement"


def test_a_rank_alone_starts_complete_buckets_at_once() -> None:
    rank = Rank(ALONE)
    rank.num_complete = 2
    rank.agreement.announce(Act.BACKWARD)
    rank.agreement.synchronize(Act.UPDATE)
    assert rank.started == [2, 2]


def test_the_buckets_of_a_pass_are_not_exchanged_in_the_next(ranks: tuple[Rank, Rank]) -> None:
    """The first gather of every forward pass exchanged them again, as zeros."""
    for rank in ranks:
        rank.num_complete = 2
    announce(ranks, Act.END_BACKWARD)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(ranks[0].agreement.synchronize, Act.END_BACKWARD)
        ranks[1].agreement.synchronize(Act.END_BACKWARD)
        waiting.result()
    for rank in ranks:
        rank.num_complete = 0
        rank.started.clear()
    announce(ranks, Act.FORWARD, 0)
    assert [rank.started for rank in ranks] == [[0], [0]]
