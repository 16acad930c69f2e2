"""Collectives against sums and concatenations of every rank's values, over sockets and over gloo alone."""

import pytest
import torch

from tk.parallel.collectives import (
    PendingResult,
    all_gather,
    all_gather_dim,
    all_gather_flat,
    all_reduce,
    all_reduce_max,
    broadcast,
    gather_bytes,
    reduce_scatter_dim,
    start_reduce_scatter_flat,
    tree_sum,
)
from tk.parallel.mesh import ALONE, Group, join_world
from tk.tests.rank_pool import RankPool

SIZES = (1, 100, 20_000)  # for three ranks without a link: gloo's ring, the all-to-all of whole tensors, the ring again


def values_of(rank: int, *shape: int) -> torch.Tensor:
    """Returns small whole numbers, which are summed exactly in any order."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(rank)).float()


def groups() -> tuple[Group, Group]:
    """Returns the group of all ranks with its link, and without."""
    linked = join_world()
    assert linked.link is not None
    return linked, Group(linked.process_group, linked.rank, linked.size)


def check_elementwise() -> None:
    """Compares sums, maxima, gathered and broadcast tensors with those of all ranks' values."""
    for group in groups():
        for count in SIZES:
            parts = [values_of(rank, 2, count) for rank in range(group.size)]
            mine, whole = parts[group.rank], torch.stack(parts)
            assert all_reduce(mine.clone(), group).equal(whole.sum(dim=0))
            assert all_reduce_max(mine.clone(), group).equal(whole.amax(dim=0))
            assert torch.stack(all_gather(mine, group)).equal(whole)
            assert broadcast(mine.clone(), group).equal(parts[0])
            columns = mine.clone().t()  # not contiguous
            assert broadcast(columns, group).equal(parts[0].t())


def check_flat() -> None:
    """Compares gathers and reduce-scatters of flat buffers, also where the part is the rank's own range of them."""
    for group in groups():
        for count in SIZES:
            parts = [values_of(rank, count) for rank in range(group.size)]
            mine = slice(group.rank * count, (group.rank + 1) * count)
            output = torch.zeros(group.size * count)
            all_gather_flat(output, parts[group.rank], group)
            assert output.equal(torch.cat(parts))
            output.zero_()[mine] = parts[group.rank]
            all_gather_flat(output, output[mine], group)
            assert output.equal(torch.cat(parts))
            long = [values_of(rank, group.size * count) for rank in range(group.size)]
            own = start_reduce_scatter_flat(torch.empty(count), long[group.rank].clone(), group).wait()
            assert own.equal(torch.stack(long).sum(dim=0)[mine])


def check_dims() -> None:
    """Compares the concatenation along a dim, and this rank's part of a sum along it."""
    for group in groups():
        for dim in (-1, -2, -3):
            parts = [values_of(rank, 3, 3, 3) for rank in range(group.size)]
            assert all_gather_dim(parts[group.rank], dim, group).equal(torch.cat(parts, dim))
            shape = [4, 4, 4]
            shape[dim] = 2 * group.size
            long = [values_of(rank, *shape) for rank in range(group.size)]
            expected = torch.stack(long).sum(dim=0).chunk(group.size, dim)[group.rank]
            assert reduce_scatter_dim(long[group.rank], dim, group).equal(expected)


def gather_texts(texts: list[str]) -> list[str]:
    """Returns the gathered texts of all ranks."""
    group = join_world()
    return [data.decode() for data in gather_bytes(texts[group.rank].encode(), group)]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_maxima_gathers_and_broadcasts(rank_pool: RankPool, size: int) -> None:
    rank_pool.run(check_elementwise, size)


@pytest.mark.parametrize("size", [2, 3])
def test_flat_buffers_are_gathered_and_reduce_scattered(rank_pool: RankPool, size: int) -> None:
    rank_pool.run(check_flat, size)


def test_tensors_are_gathered_and_reduce_scattered_along_any_dim(rank_pool: RankPool) -> None:
    rank_pool.run(check_dims, 2)


@pytest.mark.parametrize("texts", [["", "", ""], ["a", "", "longer"]])
def test_bytes_of_any_length_are_gathered(rank_pool: RankPool, texts: list[str]) -> None:
    assert rank_pool.run(gather_texts, 3, texts=texts) == [texts] * 3


def test_a_group_of_one_rank_gives_back_its_tensor() -> None:
    x = values_of(0, 2, 3)
    assert all_reduce(x, ALONE) is x
    assert all_reduce_max(x, ALONE) is x
    assert all_gather(x, ALONE) == [x]
    assert all_gather_dim(x, -1, ALONE) is x
    assert reduce_scatter_dim(x, -1, ALONE) is x
    assert gather_bytes(b"abc", ALONE) == [b"abc"]
    output = torch.zeros(6)
    all_gather_flat(output, x.view(-1), ALONE)
    assert output.equal(x.view(-1))
    assert start_reduce_scatter_flat(output, 2 * x.view(-1), ALONE).wait().equal(2 * x.view(-1))


def test_a_pending_result_is_finished_after_its_work_and_in_order() -> None:
    calls: list[str] = []

    class Recorded:
        def wait(self) -> None:
            calls.append("work")

    def add(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("add")
        return tensor + 1

    def double(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("double")
        return tensor * 2

    pending = PendingResult(torch.tensor(3), Recorded(), add).then(double)
    assert calls == []
    assert pending.wait().item() == 8
    assert calls == ["work", "add", "double"]


def test_tree_sum_adds_in_a_fixed_order() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    assert tree_sum(parts).item() == 0.0, "pairs first: (1e8 + 1) + (-1e8 + 1) in fp32; from left to right it is 1"
    odd = [torch.tensor([value]) for value in (1.0, -1.0, 1e8, -1e8, 1.0)]
    assert tree_sum(odd).item() == 1.0
    assert tree_sum([*odd[:2], *odd[2:3]]).item() == 1e8, "the third moves up as it is"
