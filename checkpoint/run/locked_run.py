"""A run folder under its lock: begins, quarantines, forks and prunes steps."""

import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from ...core.errors import CheckpointError, DamagedCheckpoint
from ..files import folders, lookup, small_files
from ..format.step_names import LATEST, attempt_of, pending_step, step_name
from ..read.step_folder import StepFolder
from .pruning import good_step, is_half_removed, remove_leftover, remove_step, trash_name
from .run_lock import require_lock
from .run_view import RunView

_log = logging.getLogger(__name__)


class LockedRun(RunView):
    """A run folder whose lock this job holds. Only `RunFolder` makes these.

    Attributes:
        attempt: the random name of this start of the job; the other ranks receive it by broadcast.
        lock_fd: the lock's descriptor; -1 in a process that inherited the lock.
    """

    def __init__(self, path: Path, attempt: str, files: Collection[str] = (), lock_fd: int = -1) -> None:
        super().__init__(path)
        self.attempt = attempt
        self.lock_fd = lock_fd
        self._files = files

    def pending_step(self, step: int) -> Path:
        """The folder of a step that this attempt has not committed yet."""
        return pending_step(self.path, step, self.attempt)

    def begin_step(self, step: int) -> Path:
        """Makes the temporary folder in which every rank writes its part of a step until the commit.

        A damaged step of that number is moved to `step-N.bad-ATTEMPT`.

        Raises:
            CheckpointError: a good checkpoint has that step's name; it is never overwritten.
        """
        self.require_lock()
        final = self.path / step_name(step)
        if lookup.exists(final):
            try:
                StepFolder.open_checked(final)
            except DamagedCheckpoint:
                self.quarantine([step])
            else:
                raise CheckpointError(f"{final} is a good checkpoint and is not overwritten. Use another run folder.")
        folder = self.pending_step(step)
        folders.make_dirs(folder)
        return folder

    def require_lock(self) -> None:
        """Raises CheckpointError if another job has taken the lock; call it before a change of the run folder."""
        require_lock(self.path, self.attempt)

    def clear_leftovers(self) -> None:
        """Removes what earlier attempts have left, which are dead: only the lock's holder can be alive.

        These are temporary folders and half-removed steps. What cannot be removed stays, with a warning.
        """
        for name in lookup.list_names(self.path):
            if attempt_of(name, self._files) not in (None, self.attempt) or is_half_removed(self.path / name):
                remove_leftover(self.path / name)

    def abandon_step(self, step: int) -> None:
        """Removes the files of a step of this attempt that will not be committed, so that they keep no disk full."""
        remove_leftover(self.pending_step(step))

    def quarantine(self, steps: Iterable[int]) -> None:
        """Moves damaged steps to `step-N.bad-ATTEMPT`, the newest first."""
        self.require_lock()
        for step in sorted(steps, reverse=True):
            path = self.path / step_name(step)
            folders.rename(path, path.with_name(f"{path.name}.bad-{self.attempt}"))
            folders.fsync_dir(self.path)

    def fork(self, step: int) -> Path | None:
        """Moves every step newer than `step` to `forked-ATTEMPT/` and returns that folder; None if there is none.

        The newest is moved first, so that a crash in between leaves a run without a gap.
        """
        self.require_lock()
        newer = [path for number, path in reversed(self.steps()) if number > step]
        if not newer:
            return None
        older = [number for number, _ in self.steps() if number <= step]
        if older:
            self.point_latest(older[-1])
        else:
            folders.remove_file(self.path / LATEST)
        folder = self.path / f"forked-{self.attempt}"
        folders.make_dirs(folder)
        for path in newer:
            folders.rename(path, folder / path.name)
            folders.fsync_dir(folder)
            folders.fsync_dir(self.path)
        return folder

    def point_latest(self, step: int) -> None:
        """Writes a step's name to LATEST, a hint for users and scripts."""
        small_files.replace_small(self.path / LATEST, f"{step_name(step)}\n".encode(), self.attempt)

    def prune(self, keep: int, keep_every: int = 0) -> list[Path]:
        """Removes old steps: all but the newest `keep` (at least 1) and those that `keep_every` divides (0: none).

        Only good steps are counted and removed, so the newest good one always stays. A step that holds files which no
        save wrote stays too, and so does one that the system does not remove; both are logged.

        Returns:
            The folders removed, oldest first.
        """
        self.require_lock()
        for name in lookup.list_names(self.path):
            if name.endswith(trash_name("", self.attempt)) or is_half_removed(self.path / name):
                remove_leftover(self.path / name)  # an earlier try failed
        steps, left, old = self.steps()[::-1], max(keep, 1), list[Path]()
        milestones = {step for step, _ in steps if keep_every and step % keep_every == 0}
        if milestones.issuperset(step for step, _ in steps[left:]):
            return []
        for step, path in steps:
            if left == 0 and step in milestones:
                continue
            found = good_step(path)
            if found is None:
                continue
            if left:
                left -= 1
            elif foreign := found.unknown_names():
                _log.warning("%s is not pruned: it holds %s, which no save wrote.", path, ", ".join(foreign[:3]))
            else:
                old.append(path)
        return [path for path in reversed(old) if remove_step(path, self.attempt)]
