"""Messages between ranks: right values in both directions at once, in any number, for every dtype that is sent."""

import pytest
import torch
import torch.distributed as dist

from tk.parallel.mesh import ALONE
from tk.parallel.point_to_point import Receive, Send, connect, exchange
from tk.tests.rank_pool import RankPool
from tk.tests.train.pipeline.toy_model import whole_group


def message(source: int, destination: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor that `source` sends, which differs from message to message."""
    return (torch.arange(12).reshape(3, 4) + 1000 * source + 100 * destination + 10 * index).to(dtype)


def check_ring(dtype: str) -> None:
    """Sends to and receives from both neighbours, with several batches under way, and waits in reverse order."""
    group, of_dtype = whole_group(), getattr(torch, dtype)
    connect(group, torch.device("cpu"))
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    received, sent = [], []
    for index in range(5):
        sends = [Send(message(group.rank, to, index, of_dtype), to) for to in (after, before)]
        receives = [Receive(torch.zeros(3, 4, dtype=of_dtype), source) for source in (before, after)]
        pendings = exchange([*sends, *receives], group)
        sent += pendings[:2]
        received += [(index, source, pending) for source, pending in zip((before, after), pendings[2:], strict=True)]
    for index, source, pending in reversed(received):
        assert torch.equal(pending.wait(), message(source, group.rank, index, of_dtype))
    for pending in sent:
        pending.wait()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_neighbours_in_a_ring_exchange(rank_pool: RankPool, world_size: int, dtype: str) -> None:
    rank_pool.run(check_ring, world_size, dtype=dtype)


def check_pair() -> None:
    """Exchanges non-contiguous tensors between two ranks, with the receives posted first."""
    group = whole_group()
    peer = 1 - group.rank
    buffers = [torch.zeros(4, 3), torch.zeros(4, 3)]
    ahead = exchange([Receive(buffer, peer) for buffer in buffers], group)
    sent = [exchange([Send(message(group.rank, peer, i, torch.float32).t(), peer)], group)[0] for i in range(2)]
    dist.barrier()
    for index, pending in enumerate(ahead):
        assert torch.equal(pending.wait(), message(peer, group.rank, index, torch.float32).t())
    for pending in sent:
        pending.wait()


def test_receives_may_be_posted_long_before(rank_pool: RankPool) -> None:
    rank_pool.run(check_pair, 2)


def test_nothing_to_exchange_is_nothing() -> None:
    connect(ALONE, torch.device("cpu"))
    assert exchange([], ALONE) == []
