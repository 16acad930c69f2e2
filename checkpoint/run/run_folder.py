"""A run folder by its path, and the lock that a process needs to write there."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..files import folders, lookup
from ..format.step_names import new_attempt, step_of
from .locked_run import LockedRun
from .run_lock import LOCK, run_lock
from .run_view import RunView


class RunFolder(RunView):
    """A run folder by its path, not locked yet.

    Args:
        path: the run folder.
        files: names of small files that a job replaces in the folder; half-written copies of dead attempts are removed
            like those of steps.
    """

    def __init__(self, path: Path, files: Collection[str] = ()) -> None:
        super().__init__(path)
        self._files = files

    @contextmanager
    def lock(self) -> Iterator[LockedRun]:
        """Makes the folder, holds its lock inside the block (see run_lock.py), and removes leftovers of dead attempts.

        Raises:
            CheckpointError: another job holds it.
            StorageError: the folder cannot be written.
        """
        folders.make_dirs(self.path)
        attempt = new_attempt()
        with run_lock(self.path, attempt, self.held_by(attempt).clear_leftovers) as fd:
            run = LockedRun(self.path, attempt, self._files, fd)
            run.clear_leftovers()
            yield run

    def held_by(self, attempt: str) -> LockedRun:
        """Returns the run for another process of the job that holds its lock; changes are refused if the lock is lost.

        Args:
            attempt: `LockedRun.attempt` of the process that took the lock.
        """
        return LockedRun(self.path, attempt, self._files)


@contextmanager
def holding(target: Path) -> Iterator[None]:
    """Holds the lock of the run in which a new folder becomes a step; does nothing for other folders.

    Raises:
        CheckpointError: a job holds the run's lock.
    """
    run = RunFolder(target.parent)
    if step_of(target.name) is None or not (lookup.exists(run.path / LOCK) or run.steps()):
        yield
        return
    with run.lock():
        yield
