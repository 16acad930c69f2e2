"""NUMA nodes, read from folders as Linux has them, and their ranks."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.numa import cores_per_rank, node_of_rank, numa_nodes


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 12 nodes, of which the last has memory alone; this process may use the cores 2 to 27."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 28)))
    lists = ["0-1,24-25\n", "2-3,26-27\n", *(f"{2 * n}-{2 * n + 1},{24 + 2 * n}\n" for n in range(2, 11)), "\n"]
    for number, text in enumerate(lists):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    (tmp_path / "power").mkdir()
    return tmp_path


def test_nodes_have_the_usable_cores_in_the_order_of_their_numbers(system: Path) -> None:
    nodes = numa_nodes(system)
    assert list(map(set, nodes[:3])) == [{24, 25}, {2, 3, 26, 27}, {4, 5}]
    assert nodes[10] == {20, 21}
    assert len(nodes) == 11


def test_a_machine_without_nodes_is_one(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path / "none") == (frozenset(os.sched_getaffinity(0)),)
    assert frozenset().union(*numa_nodes()) == os.sched_getaffinity(0)


@given(st.integers(1, 9), st.integers(1, 40))
def test_ranks_are_spread_evenly(num_nodes: int, size: int) -> None:
    """Ranks of a node are neighbours, no node has two more than another, and with fewer ranks each has its own node."""
    nodes = [frozenset(range(8 * n, 8 * n + 8)) for n in range(num_nodes)]
    order = [nodes.index(node_of_rank(nodes, rank, size)) for rank in range(size)]
    assert order == sorted(order)
    counts = [order.count(number) for number in range(min(num_nodes, size))]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == size
    assert cores_per_rank(nodes, size) == max(1, 8 // max(counts))


def test_the_smallest_node_decides_the_cores_of_a_rank() -> None:
    assert cores_per_rank([frozenset(range(16)), frozenset(range(16, 22))], 2) == 6
    assert cores_per_rank([frozenset(range(16)), frozenset(range(16, 22))], 4) == 3
