"""Finds the ranks that hold up a job, from the heartbeats of all ranks, and describes where each rank is (no torch)."""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from .heartbeat import STARTING, Beat, read_beats

FLIGHT_RECORD: Final = "flight-recorder-rank-{rank}.json"
START_SECONDS: Final = 60.0  # the least time in which a rank may load its libraries
STALL_REPORT: Final = "stall-report.txt"


class StallDetector:
    """Finds ranks whose heartbeats do not change.

    It measures time with the clock of its own process, since the clocks of other hosts may differ. A rank that still
    loads its libraries has `START_SECONDS` at least.

    Args:
        folder: the folder of the heartbeats.
        num_ranks: the number of ranks of the job.
        limit: the time in seconds after which a rank without a new phase is stuck.
        clock: returns the time in seconds.

    Attributes:
        beats: the newest heartbeat of each rank.
        changed: the time at which each rank's heartbeat last changed.
    """

    def __init__(self, folder: Path, num_ranks: int, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.limit = limit
        self.clock = clock
        self.beats = read_beats(folder, num_ranks)
        self.changed = [clock()] * num_ranks

    def look(self) -> list[int]:
        """Reads all heartbeats; returns the ranks whose heartbeat has not changed for longer than the limit."""
        now, beats = self.clock(), read_beats(self.folder, len(self.beats))
        for rank, beat in enumerate(beats):
            if beat != self.beats[rank]:
                self.changed[rank] = now
        self.beats = beats
        limits = [max(self.limit, START_SECONDS) if beat.phase == STARTING else self.limit for beat in beats]
        return [rank for rank, since in enumerate(self.changed) if now - since > limits[rank]]

    def seconds_in_place(self, ranks: Collection[int]) -> float:
        """Returns for how long none of the ranks has begun another phase, by the heartbeats that were read last."""
        return self.clock() - max(self.changed[rank] for rank in ranks)


def describe_places(beats: Sequence[Beat], culprits: Collection[int]) -> str:
    """Returns the places of all ranks, those of the culprits first.

    For example: "rank 3 is at step 41 in forward; ranks 0-2 wait at step 41 in reduce".
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for beat in sorted(beats, key=lambda beat: beat.rank not in culprits):
        waits = beat.rank not in culprits and beat.step > 0
        groups.setdefault(("wait" if waits else "be", beat.place), []).append(beat.rank)
    verbs = {("be", False): "is", ("be", True): "are", ("wait", False): "waits", ("wait", True): "wait"}
    return "; ".join(
        f"{name_ranks(ranks)} {verbs[verb, len(ranks) > 1]} {place}" for (verb, place), ranks in groups.items()
    )


def name_ranks(ranks: Collection[int]) -> str:
    """Returns ranks as text, with ranges for successive ones: [0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def name_flight_records(logs: Path, since: float) -> str:
    """Returns a sentence that names this job's flight recorder files in `logs`; "" if there are none.

    Args:
        logs: the folder of the files.
        since: the start of the job in seconds since the epoch; older files belong to earlier jobs.
    """
    pattern = FLIGHT_RECORD.format(rank="*")
    dumps = sorted(path for path in logs.glob(pattern) if path.stat().st_mtime >= since)
    if not dumps:
        return ""
    more = f" and {len(dumps) - 1} other files there" if len(dumps) > 1 else ""
    return f" The last collectives (flight recorder) are in {dumps[0]}{more}."
