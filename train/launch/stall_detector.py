"""Who holds up a job: from the ranks' heartbeats to the ranks that are stuck, and to one report. No torch."""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from .heartbeat import STARTING, Beat, read_beats

FLIGHT_RECORD: Final = "flight-recorder-rank-{rank}.json"
START_SECONDS: Final = 60.0
STALL_REPORT: Final = "stall-report.txt"


class StallDetector:
    """Notices ranks whose heartbeats stand still, by this process's own clock: no clock of a rank is trusted. To start,
    which is to load libraries, a rank always has a minute.

    Args:
        limit: seconds after which a rank that began no new phase is stuck.
    """

    def __init__(self, folder: Path, num_ranks: int, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.limit = limit
        self.clock = clock
        self.beats = read_beats(folder, num_ranks)
        self.changed = [clock()] * num_ranks

    def look(self) -> list[int]:
        """Reads all heartbeats; returns the ranks that have stood still for longer than the limit."""
        now, beats = self.clock(), read_beats(self.folder, len(self.beats))
        for rank, beat in enumerate(beats):
            if beat != self.beats[rank]:
                self.changed[rank] = now
        self.beats = beats
        limits = [max(self.limit, START_SECONDS) if beat.phase == STARTING else self.limit for beat in beats]
        return [rank for rank, since in enumerate(self.changed) if now - since > limits[rank]]


def describe_places(beats: Sequence[Beat], culprits: Collection[int]) -> str:
    """Who is where: "rank 3 is at step 41 in forward; ranks 0-2 wait at step 41 in reduce"."""
    groups: dict[tuple[str, str], list[int]] = {}
    for beat in sorted(beats, key=lambda beat: beat.rank not in culprits):
        waits = beat.rank not in culprits and beat.step > 0
        groups.setdefault(("wait" if waits else "be", beat.place), []).append(beat.rank)
    verbs = {("be", False): "is", ("be", True): "are", ("wait", False): "waits", ("wait", True): "wait"}
    return "; ".join(
        f"{name_ranks(ranks)} {verbs[verb, len(ranks) > 1]} {place}" for (verb, place), ranks in groups.items()
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of them joined: [0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def name_flight_records(logs: Path, since: float) -> str:
    """A sentence that names the flight recorder dumps of this job in `logs`, "" if there is none.

    Args:
        since: seconds since the epoch; older files are of earlier jobs.
    """
    pattern = FLIGHT_RECORD.format(rank="*")
    dumps = sorted(path for path in logs.glob(pattern) if path.stat().st_mtime >= since)
    if not dumps:
        return ""
    more = f" and {len(dumps) - 1} beside it" if len(dumps) > 1 else ""
    return f" The last collectives (flight recorder) are in {dumps[0]}{more}."
