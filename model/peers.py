"""The ranks of one host that load a checkpoint together."""

from functools import partial

from ..checkpoint.read.shared_read import Peers
from ..parallel.collectives import gather_bytes
from ..parallel.mesh import Group


def peers(group: Group) -> Peers:
    """Returns the ranks of a group, all on one host, as ranks that load a checkpoint together."""
    return Peers(group.rank, group.size, partial(gather_bytes, group=group))
