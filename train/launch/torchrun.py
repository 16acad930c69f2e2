"""What ranks do about each other where torchrun, which cannot know their steps, has started them. No torch."""

import os
import time
from pathlib import Path

from ...core.errors import WorkerDied
from .heartbeat import Heartbeat, read_beats
from .stall_detector import STALL_REPORT, describe_places, name_flight_records

GRACE_SECONDS = 5.0  # that other ranks get to give up too
_POLL_SECONDS = 0.05


def set_aside_report(logs: Path) -> None:
    """Gives an earlier attempt's report a name of its own; rank 0 calls it before ranks meet."""
    path = logs / STALL_REPORT
    if path.exists():
        path.rename(path.with_stem(f"{path.stem}-{int(path.stat().st_mtime)}"))


def give_up(
    heartbeat: Heartbeat, heartbeats: Path, num_ranks: int, logs: Path, timeout: float, seen: Exception
) -> WorkerDied:
    """The error of a rank that lost others or waited for them in vain: the first one writes the report for all.

    Ranks that have not given up too within a moment are the ones that are gone or stuck.

    Args:
        seen: what this rank noticed it by.
    """
    heartbeat.give_up()
    path = logs / STALL_REPORT
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return WorkerDied(f"Other ranks are gone or stuck; see {path}.")
    started, deadline = time.time(), time.monotonic() + min(GRACE_SECONDS, timeout)
    while True:
        beats = read_beats(heartbeats, num_ranks)
        culprits = [beat.rank for beat in beats if not beat.gave_up]
        if len(culprits) <= 1 or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    report = (
        f"Gone, or without progress for {timeout:g} seconds ([parallel] timeout_seconds): "
        f"{describe_places(beats, culprits)}. The first to notice saw: {str(seen).rstrip('.')}."
        f"{name_flight_records(logs, started - timeout)} Committed checkpoints are whole."
    )
    with os.fdopen(file, "w", encoding="utf-8") as stream:
        stream.write(report + "\n")
    return WorkerDied(report)
