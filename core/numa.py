"""The NUMA nodes of this machine: groups of cores with memory of their own, which they read faster than other memory.

A process whose threads stay on one node has its memory there, too: Linux gives a page from the node of the core that
first writes it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_SYSTEM: Final = Path("/sys/devices/system/node")


def numa_nodes(system: Path = _SYSTEM) -> tuple[frozenset[int], ...]:
    """Returns the cores that this process may use of each NUMA node in order; without any it is left out.

    Args:
        system: where Linux describes the nodes; a machine that has no such folder is one node.
    """
    usable = frozenset(os.sched_getaffinity(0))
    folders = sorted(system.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    nodes = [usable & _cores((folder / "cpulist").read_text(encoding="ascii")) for folder in folders]
    return tuple(node for node in nodes if node) or (usable,)


def node_of_rank(nodes: Sequence[frozenset[int]], rank: int, size: int) -> frozenset[int]:
    """Returns the cores of a rank's node: neighbouring ranks share one if there are more ranks than nodes.

    Ranks that share a node share all its cores, because the two threads of one core can have distant numbers.
    """
    return nodes[rank * len(nodes) // size if size > len(nodes) else rank]


def cores_per_rank(nodes: Sequence[frozenset[int]], size: int) -> int:
    """Returns the number of cores that every one of so many ranks has to itself, at least 1."""
    found = [node_of_rank(nodes, rank, size) for rank in range(size)]
    return max(1, min(len(node) // found.count(node) for node in set(found)))


def _cores(text: str) -> frozenset[int]:
    """Returns the numbers of a list as the kernel writes it: 0-3,8,10-11."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(core for low, _, high in ranges for core in range(int(low), int(high or low) + 1))
