"""Reports lost or stuck ranks of a job that torchrun started: torchrun has no record of their steps (no torch)."""

import os
import time
from pathlib import Path

from ...core.errors import WorkerDied
from ..health.heartbeat import Heartbeat, read_beats
from ..health.stall_detector import STALL_REPORT, describe_places, name_flight_records

GRACE_SECONDS = 5.0  # the time in which other waiting ranks give up too
_POLL_SECONDS = 0.05


def keep_earlier_report(logs: Path) -> None:
    """Renames the report of an earlier attempt; rank 0 calls it before the rendezvous."""
    path = logs / STALL_REPORT
    if path.exists():
        path.rename(path.with_stem(f"{path.stem}-{int(path.stat().st_mtime)}"))


def give_up(
    heartbeat: Heartbeat, heartbeats: Path, num_ranks: int, logs: Path, timeout: float, seen: Exception
) -> WorkerDied:
    """Returns the error for a rank that lost other ranks or waited for them in vain.

    The first rank that gives up writes the report for all. Ranks that wait for a stuck rank give up within seconds of
    each other, so a rank that has not given up after that time is dead or stuck.

    Args:
        heartbeat: this rank's heartbeat.
        heartbeats: the folder of all heartbeats.
        num_ranks: the number of ranks of the job.
        logs: the folder for the report.
        timeout: [parallel] timeout_seconds.
        seen: the error by which this rank noticed it.
    """
    heartbeat.give_up()
    path = logs / STALL_REPORT
    try:
        # O_EXCL: exactly one rank creates the file, also over a shared file system.
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return WorkerDied(f"Other ranks have died or are stuck; see {path}.")
    started, deadline = time.time(), time.monotonic() + min(GRACE_SECONDS, timeout)
    while True:
        beats = read_beats(heartbeats, num_ranks)
        culprits = [beat.rank for beat in beats if not beat.gave_up]
        if len(culprits) <= 1 or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    report = (
        f"Ranks have died, or made no progress for {timeout:g} seconds ([parallel] timeout_seconds): "
        f"{describe_places(beats, culprits)}. The first rank that noticed it had this error: {str(seen).rstrip('.')}."
        f"{name_flight_records(logs, started - timeout)} Committed checkpoints are intact."
    )
    with os.fdopen(file, "w", encoding="utf-8") as stream:
        stream.write(report + "\n")
    return WorkerDied(report)
