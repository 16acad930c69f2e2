"""The group of ranks on one host, which can pass bytes to each other through memory."""

from datetime import timedelta

import torch.distributed as dist

from .collectives import gather_bytes
from .link_factory import host_identity
from .mesh import ALONE, Group


def host_group(world: Group, timeout: float) -> Group:
    """Returns the group of the ranks that run on this rank's host, in the same container; every rank calls it.

    Args:
        world: the group of all ranks.
        timeout: seconds after which the new group's collectives give up.
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
