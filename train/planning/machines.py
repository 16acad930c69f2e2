"""The machines of a planned run: how many they are, and how fast offload can move bytes there (no torch)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.integers import ceil_div
from .moved_bytes import Moved

USUAL_LINK = 12e9  # bytes per second of a GPU's link
USUAL_DISK = 1.5e9  # bytes per second of reads, or of writes


@dataclass(frozen=True, slots=True)
class Machines:
    """The hosts of a run.

    Attributes:
        hosts: the number of machines, with equal numbers of ranks.
        link: bytes per second between the host and each of its GPUs; None = unknown.
        disk: bytes per second that the ranks of a host together read, and write; None = unknown.
    """

    hosts: int = 1
    link: float | None = None
    disk: tuple[float, float] | None = None

    def ranks_of_a_host(self, world_size: int) -> int:
        """Returns the number of ranks on a host."""
        return ceil_div(world_size, self.hosts)

    def seconds(self, moved: Moved, neighbours: int) -> dict[str, float]:
        """Returns the time of each direction for which a rate is known.

        Args:
            moved: the bytes of a rank.
            neighbours: the number of ranks that share a disk.
        """
        times: dict[str, float] = {}
        if self.link is not None:
            times |= {"down": moved.down / self.link, "up": moved.up / self.link}
        if self.disk is not None:
            reads, writes = self.disk
            times |= {"read": neighbours * moved.read / reads, "written": neighbours * moved.written / writes}
        return times

    def cost(self, moved: Moved, neighbours: int, on_gpu: bool) -> float:
        """Returns the seconds of all that a rank moves in a step, at usual rates where none is known."""
        known = Machines(self.hosts, self.link or USUAL_LINK, self.disk or (USUAL_DISK, USUAL_DISK))
        times = known.seconds(moved, neighbours)
        return sum(time for name, time in times.items() if on_gpu or name not in ("down", "up"))


def per_host(by_stage: Sequence[int], stage_size: int, ranks_of_a_host: int) -> int:
    """Returns the most bytes of the ranks of one host.

    Args:
        by_stage: the bytes of each rank of a pipeline stage, by stage.
        stage_size: the number of ranks of a pipeline stage, which are consecutive.
        ranks_of_a_host: the number of ranks on a host, which are consecutive.
    """
    of_ranks = [size for size in by_stage for _ in range(stage_size)]
    return max(sum(part) for part in _runs(of_ranks, ranks_of_a_host))


def _runs(values: list[int], length: int) -> Iterator[list[int]]:
    for begin in range(0, len(values), length):
        yield values[begin : begin + length]
