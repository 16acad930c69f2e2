"""Which ranks share a machine: those can hand each other bytes through memory."""

from datetime import timedelta

import torch.distributed as dist

from .collectives import gather_bytes
from .local_link import host_identity
from .mesh import ALONE, Group


def on_this_host(world: Group, timeout: float) -> Group:
    """The ranks of the world's that run where this one does, in the same container; every rank calls it.

    Args:
        timeout: seconds after which the group's collectives give up.
    """
    here = host_identity()
    hosts: dict[bytes, list[int]] = {}
    for rank, name in enumerate(gather_bytes(here, world)):
        hosts.setdefault(name, []).append(rank)
    if len(hosts) == 1:
        return world
    groups = {name: dist.new_group(ranks, timedelta(seconds=timeout)) for name, ranks in hosts.items()}
    mine = hosts[here]
    return Group(groups[here], mine.index(world.rank), len(mine)) if len(mine) > 1 else ALONE
