"""The group of ranks on one host, which can pass bytes to each other through memory."""

from datetime import timedelta

import torch.distributed as dist

from .meeting import Meeting
from .mesh import ALONE, Group


def host_group(world: Group, timeout: float) -> Group:
    """Returns the group of the ranks that run on this rank's host, in the same container; every rank calls it.

    Args:
        world: the group of all ranks.
        timeout: seconds after which the new group's collectives give up.
    """
    if world.size == 1:
        return world
    ranks = Meeting().host_ranks()
    if len(ranks) == world.size:
        return world
    made = dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True)
    return Group(made, ranks.index(world.rank), len(ranks)) if len(ranks) > 1 else ALONE
