"""A rank for tests of the launcher, without torch: it makes steps with heartbeats, and fails in step 3 on request.

`python -m tk.tests.train.launch.light_rank RANK FAULT`: in forward of step 3, rank RANK sleeps or fails. A rank waits
for the others in each step, and gives one up as soon as its file says that it is stuck: no clock decides that.
"""

import os
import sys
import time
from pathlib import Path

from tk.core.errors import WorkerDied
from tk.core.process import die_with_parent
from tk.train.health.heartbeat import HEARTBEATS_VARIABLE, STARTING, Heartbeat, read_beats
from tk.train.launch.rank_report import write_error


def stuck_file(folder: Path, rank: int) -> Path:
    """The file that tells the others that a rank is stuck, in the folder of heartbeats."""
    return folder / f"stuck-{rank}"


def main() -> int:
    die_with_parent()
    fault, rank, world = sys.argv[2], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder, faulty = Path(os.environ[HEARTBEATS_VARIABLE]), rank == int(sys.argv[1])
    heartbeat = Heartbeat(folder, rank)
    heartbeat.beat("ready")
    while any(beat.phase == STARTING for beat in read_beats(folder, world)):
        time.sleep(0.001)
    for step in range(1, 100_000):
        heartbeat.beat("forward", step)
        if faulty and step == 3 and fault != "none":
            stuck_file(folder, rank).touch()
            if fault == "sleep":
                time.sleep(3600)
            write_error(ValueError("a fault of its own"), rank, peers_lost=False)
            return 1
        heartbeat.beat("reduce")
        while True:
            stuck = {other for other in range(world) if stuck_file(folder, other).exists()}
            beats = read_beats(folder, world)  # after that: the last ones of those that are stuck
            late = {each.rank for each in beats if each.step < step or (each.step, each.phase) == (step, "forward")}
            if not late:
                break
            if late & stuck:
                write_error(WorkerDied("a neighbour does not answer"), rank, peers_lost=True)
                return 1
            time.sleep(0.001)
    return 0


if __name__ == "__main__":
    sys.exit(main())
