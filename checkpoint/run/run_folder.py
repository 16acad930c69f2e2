"""A run folder: its steps, which of them count, the lock that keeps a second writer out, and pruning."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, DamagedCheckpoint
from ..files import folders, lookup, small_files
from ..format.manifest import MANIFEST
from ..format.step_names import attempt_of, is_misnamed, new_attempt, step_aside, step_name, step_of
from ..read.reader import Checkpoint
from .run_lock import LOCK, require_lock, run_lock
from .strangers import foreign_names

LATEST: Final = "LATEST"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step that counts (None if no step does), and why each newer one was skipped: step -> reason."""

    checkpoint: Checkpoint | None = None
    skipped: Mapping[int, str] = field(default_factory=dict)


class RunFolder:
    """What anybody may ask of a run folder without holding its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[tuple[int, Path]]:
        """(step, folder) of every step folder by its name, oldest first, whether it counts or not."""
        numbers = {name: step_of(name) for name in lookup.list_names(self.path)}
        return sorted((number, self.path / name) for name, number in numbers.items() if number is not None)

    def newest(self, before: float = math.inf) -> Newest:
        """The newest step with whole metadata and files of the right sizes; checksums are checked on reading.

        Only what is damaged is passed over. What cannot be read now, or is whole and not what its name says, leaves
        open which step is meant.

        Args:
            before: look at steps older than this one only.

        Raises:
            CheckpointError: a folder holds another step than its name says, or one of a newer tk.
            StorageError: a file cannot be opened or read.
        """
        self._refuse_misnamed()
        skipped: dict[int, str] = {}
        for step, path in reversed(self.steps()):
            if step >= before:
                continue
            try:
                return Newest(Checkpoint.open_step(path, tuple(skipped.values())), skipped)
            except DamagedCheckpoint as error:
                skipped[step] = f"{path.name} skipped: {error}"
        return Newest(None, skipped)

    def _refuse_misnamed(self) -> None:
        for name in lookup.list_names(self.path):
            if is_misnamed(name) and lookup.exists(self.path / name / MANIFEST):
                raise CheckpointError(
                    f"{self.path / name} holds a step and is not named as a run names one (step 7 is {step_name(7)}): "
                    "rename it, or move it out of the run."
                )

    @contextmanager
    def lock(self) -> Iterator["LockedRun"]:
        """Keeps other writing jobs out while inside (see run_lock.py); makes the folder, and clears what dead attempts
        left.

        Raises:
            CheckpointError: another job holds it.
            StorageError: the folder cannot be written.
        """
        folders.make_dirs(self.path)
        attempt = new_attempt()
        with run_lock(self.path, attempt) as fd:
            run = LockedRun(self.path, attempt, fd)
            run.clear_leftovers()
            yield run


@contextmanager
def holding(target: Path) -> Iterator[None]:
    """Holds the lock of the run of which a new folder becomes a step, while inside; of nothing for other folders.

    Raises:
        CheckpointError: a job holds it.
    """
    run = RunFolder(target.parent)
    if step_of(target.name) is None or not (lookup.exists(run.path / LOCK) or run.steps()):
        yield
        return
    with run.lock():
        yield


class LockedRun(RunFolder):
    """A run folder whose lock this process holds, itself or for the one that started it.

    Attributes:
        attempt: this start's name; a job's other ranks get it by broadcast.
        lock_fd: the lock's descriptor; whoever inherits it holds the lock too.
    """

    def __init__(self, path: Path, attempt: str, lock_fd: int = -1) -> None:
        super().__init__(path)
        self.attempt = attempt
        self.lock_fd = lock_fd

    def begin_step(self, step: int) -> Path:
        """The folder in which every rank writes its part of a step, aside until it is committed.

        A damaged step of that number is moved to `step-N.bad-ATTEMPT`.

        Raises:
            CheckpointError: a good checkpoint is there; it is never overwritten.
        """
        self.require_lock()
        final = self.path / step_name(step)
        if lookup.exists(final):
            try:
                Checkpoint.open_step(final)
            except DamagedCheckpoint:
                self.set_aside([step])
            else:
                raise CheckpointError(f"{final} is a good checkpoint and is not overwritten; use another run folder.")
        folder = step_aside(self.path, step, self.attempt)
        folders.make_dirs(folder)
        return folder

    def require_lock(self) -> None:
        """Raises CheckpointError where another job has taken the lock: nothing is published, moved or removed then."""
        require_lock(self.path, self.attempt)

    def clear_leftovers(self) -> None:
        """Removes what saves and prunings of dead attempts left: none but the lock's holder can be alive."""
        for name in lookup.list_names(self.path):
            if attempt_of(name) not in (None, self.attempt):
                folders.remove_tree(self.path / name)

    def set_aside(self, steps: Iterable[int]) -> None:
        """Moves steps that were found damaged to `step-N.bad-ATTEMPT`, the newest first."""
        self.require_lock()
        for step in sorted(steps, reverse=True):
            path = self.path / step_name(step)
            folders.rename(path, path.with_name(f"{path.name}.bad-{self.attempt}"))
            folders.fsync_dir(self.path)

    def fork(self, step: int) -> Path | None:
        """Moves every step newer than `step` to `forked-ATTEMPT/`; None if there is none.

        The newest goes first, so that a crash between leaves a run that ends at a step of its own.
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
        """Has LATEST, a hint for people and scripts, name a step."""
        small_files.replace_small(self.path / LATEST, f"{step_name(step)}\n".encode(), self.attempt)

    def prune(self, keep: int, keep_every: int = 0) -> list[Path]:
        """Removes old steps: all but the newest `keep` (at least 1) and those that `keep_every` divides (0: none).

        Only steps that count are counted or removed, so the newest good one always stays; and only those that hold
        nothing but what a save wrote.

        Returns:
            The folders removed, oldest first.
        """
        self.require_lock()
        left, old = max(keep, 1), []
        for step, path in reversed(self.steps()):
            if left == 0 and keep_every and step % keep_every == 0:
                continue
            found = _good(path)
            if found is None:
                continue
            if left:
                left -= 1
            elif foreign := foreign_names(found):
                _log.warning("%s is not pruned: it holds %s, which no save wrote.", path, ", ".join(foreign[:3]))
            else:
                old.append(path)
        for path in reversed(old):
            trash = path.with_name(f"{path.name}.trash-{self.attempt}")
            folders.rename(path, trash)
            folders.fsync_dir(self.path)  # else a power cut could bring the name back over what is half removed
            folders.remove_tree(trash)
        return old[::-1]


def _good(path: Path) -> Checkpoint | None:
    try:
        return Checkpoint.open_step(path)
    except CheckpointError:
        return None
