"""A process that saves step after step in the background and prints each when it is committed, until it is killed."""

import itertools
import sys
from pathlib import Path

from tk.checkpoint import RunFolder
from tk.checkpoint.save.background_save import BackgroundSaver
from tk.tests.checkpoint.crashing import job_of, values_of


def main() -> None:
    """Two ranks in one process, each with a writer of its own."""
    with RunFolder(Path(sys.argv[1])).lock() as run:
        newest = run.newest().checkpoint
        writers = [
            BackgroundSaver(job_of(run.path, run.attempt, rank), run.lock_fd if rank == 0 else -1) for rank in (0, 1)
        ]
        for step in itertools.count(newest.step + 1 if newest else 1):
            for writer in writers:
                for item in writer.job.items():
                    writer.buffer(item)[:] = values_of(step)(item)
                writer.begin(step, {"step": step})
            for writer in writers:
                writer.wait()
            print(step, flush=True)


if __name__ == "__main__":
    main()
