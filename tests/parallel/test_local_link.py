"""Links between ranks of one host give gloo's results, in any order of waiting; errors name the peer."""

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tk.core.layout import Layout
from tk.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    broadcast,
    start_all_gather_flat,
    start_all_reduce,
    start_reduce_scatter_flat,
)
from tk.parallel.link_factory import LinkFactory
from tk.parallel.local_link import LinkLost
from tk.parallel.meeting import Meeting
from tk.parallel.mesh import Group, Mesh, join_world
from tk.parallel.point_to_point import Receive, Send, exchange
from tk.tests.rank_pool import RankPool


def compare_with_gloo() -> list[str]:
    """Returns the names of the collectives whose results differ between link and gloo."""
    linked = join_world()
    assert linked.link is not None
    plain = Group(linked.process_group, linked.rank, linked.size)
    differing = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for count in (0, 1, 7, 4096, 70_000):
            draw = torch.Generator().manual_seed(linked.rank)
            values = torch.randint(-8, 8, (linked.size * count,), generator=draw).to(dtype)  # sums are exact
            for name, collective in COLLECTIVES.items():
                mine, theirs = (collective(values.clone(), group) for group in (linked, plain))
                if not torch.equal(mine, theirs):
                    differing.append(f"{name} of {count} {dtype}")
    scalar = [all_reduce(torch.tensor(float(linked.rank)), group).item() for group in (linked, plain)]
    return differing + ([] if scalar[0] == scalar[1] else ["a scalar"])


def _gathered(values: torch.Tensor, group: Group) -> torch.Tensor:
    part = values[: len(values) // group.size]
    return start_all_gather_flat(torch.empty_like(values), part, group).wait()


def _scattered(values: torch.Tensor, group: Group) -> torch.Tensor:
    return start_reduce_scatter_flat(torch.empty(len(values) // group.size, dtype=values.dtype), values, group).wait()


COLLECTIVES: dict[str, Any] = {
    "sum": all_reduce,
    "max": all_reduce_max,
    "broadcast": broadcast,
    "gather": lambda values, group: torch.stack(all_gather(values, group)),
    "flat gather": _gathered,
    "reduce-scatter": _scattered,
}


@pytest.mark.parametrize("size", [2, 3])
def test_results_are_those_of_gloo(rank_pool: RankPool, size: int) -> None:
    assert rank_pool.run(compare_with_gloo, size) == [[]] * size


def wait_out_of_order() -> bool:
    """Posts more in both directions than sockets hold, in two groups, and waits in another order.

    Returns whether every result is right.
    """
    mesh = Mesh.build(Layout(tp=2), 2)
    assert None is not mesh.tp.link is not mesh.world.link
    peer = 1 - mesh.world.rank
    gathers = [
        start_all_gather_flat(torch.empty(2 * n), torch.full((n,), float(n + mesh.world.rank)), group)
        for n, group in ((300_000, mesh.tp), (5, mesh.world), (400_000, mesh.world), (3, mesh.tp))
    ]
    small = torch.full((6,), float(mesh.world.rank))
    send, receive = exchange([Send(small, peer), Receive(torch.empty(6), peer)], mesh.tp)
    total = start_all_reduce(torch.ones(10), mesh.world)
    right = [receive.wait().tolist() == [float(peer)] * 6, total.wait().tolist() == [2.0] * 10]
    send.wait()
    for gather, n in reversed(list(zip(gathers, (300_000, 5, 400_000, 3), strict=True))):
        right.append(torch.equal(gather.wait(), torch.tensor([n, n + 1.0]).repeat_interleave(n)))
    return all(right)


def test_nothing_stops_when_sockets_are_full(rank_pool: RankPool) -> None:
    assert rank_pool.run(wait_out_of_order, 2) == [True, True]


def lose_peer(how: str) -> str:
    """Returns the error that rank 0 receives when rank 1 closes its connections or sends nothing."""
    with LinkFactory(Meeting(), timeout=60.0) as links:
        link = links.link([0, 1])
    assert link is not None
    group = Group(dist.group.WORLD, dist.get_rank(), 2, link)
    all_reduce(torch.ones(4), group)
    if how == "silent":
        links.blocked.timeout = 1.0
    if group.rank == 1:
        if how == "silent":
            dist.barrier()  # until rank 0 has its error
        del link, group
        gc.collect()
        return ""
    with pytest.raises(LinkLost) as caught:
        all_gather(torch.ones(1_000_000), group)
    if how == "silent":
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(("how", "says"), [("gone", "is gone"), ("silent", "nothing for 1 seconds")])
def test_a_lost_peer_is_named(rank_pool: RankPool, how: str, says: str) -> None:
    said = rank_pool.run(lose_peer, 2, how=how)[0]
    assert said.startswith("Rank 1 ")
    assert says in said
    assert "if the ranks have different numbers of batches, all of them must stop at the smallest number" in said


def interrupt_while_waiting(handled: str) -> float:
    """Runs a signal handler while a rank waits; returns the sum of the message, which must still arrive whole."""
    group = join_world()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: Path(handled).touch())
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        if group.rank == 0:
            timer.start()
        while group.rank == 1 and not Path(handled).exists():
            time.sleep(0.005)
        result = all_reduce(torch.ones(50_000), group).sum().item()
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)
    return result


def test_signals_do_not_disturb_a_message(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(interrupt_while_waiting, 2, handled=str(tmp_path / "handled")) == [100_000.0] * 2
