"""Hosts share their disks among ranks, and a rate that is not known gives no time."""

import pytest

from tk.train.planning.machines import Machines, per_host
from tk.train.planning.moved_bytes import Moved

MOVED = Moved("optimizer", down=100, up=50, read=30, written=20)


def test_times_are_known_where_rates_are() -> None:
    assert Machines().seconds(MOVED, 4) == {}
    assert Machines(link=10).seconds(MOVED, 4) == {"down": 10, "up": 5}
    assert Machines(disk=(10, 5)).seconds(MOVED, 4) == {"read": 12, "written": 16}, "four ranks share the disk"


def test_on_a_cpu_nothing_goes_over_a_link() -> None:
    machines = Machines(link=10, disk=(10, 5))
    assert machines.cost(MOVED, 1, on_gpu=True) == 10 + 5 + 3 + 4
    assert machines.cost(MOVED, 1, on_gpu=False) == 3 + 4


@pytest.mark.parametrize(("hosts", "ranks", "most"), [(1, 6, 12), (2, 3, 8), (3, 2, 6), (6, 1, 3), (9, 1, 3)])
def test_the_fullest_host_has_consecutive_ranks(hosts: int, ranks: int, most: int) -> None:
    """Two ranks of each of three pipeline stages, with 1, 2 and 3 bytes each."""
    assert Machines(hosts=hosts).ranks_of_a_host(6) == ranks
    assert per_host([1, 2, 3], 2, ranks) == most
