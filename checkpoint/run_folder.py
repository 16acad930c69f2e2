"""A run folder: its steps, which of them count, the lock that keeps a second writer out, and pruning."""

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..core.errors import CheckpointError
from . import storage
from .reader import Checkpoint

LOCK: Final = "LOCK"
LATEST: Final = "LATEST"
_STEP: Final = re.compile(r"step-(\d{8,})")
_LEFTOVER: Final = re.compile(r"(step-\d{8,}|LATEST|metrics\.jsonl)\.(tmp|trash)-(?P<attempt>[0-9a-z-]+)")
_LAST_BREATH_SECONDS: Final = 10.0  # that the writer of a killed job may need to be gone too


def new_attempt() -> str:
    """A name for one start of a job, unlike any other."""
    return secrets.token_hex(4)


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def step_aside(run: Path, step: int, attempt: str) -> Path:
    """Where every rank of an attempt writes a step until it is committed; a pure function, so that all ranks agree."""
    return run / f"{step_name(step)}.tmp-{attempt}"


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step that counts (None if no step does), and why each newer one was skipped."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...] = ()


class RunFolder:
    """What anybody may ask of a run folder without holding its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[tuple[int, Path]]:
        """(step, folder) of every step folder by its name, oldest first, whether it counts or not."""
        matches = [(match, name) for name in storage.list_names(self.path) if (match := _STEP.fullmatch(name))]
        return sorted((int(match[1]), self.path / name) for match, name in matches)

    def newest(self) -> Newest:
        """The newest step with whole metadata and files of the right sizes; checksums are checked on reading."""
        skipped: list[str] = []
        for _, path in reversed(self.steps()):
            try:
                return Newest(Checkpoint.open_step(path, tuple(skipped)), tuple(skipped))
            except CheckpointError as error:
                skipped.append(f"{path.name} skipped: {error}")
        return Newest(None, tuple(skipped))

    @contextmanager
    def lock(self) -> Iterator["LockedRun"]:
        """Keeps other writing jobs out while inside; makes the folder, and clears what dead attempts left.

        The lock is the kernel's, so a dead job's is free once its last writing process is gone; the file's content
        says who holds it.

        Raises:
            CheckpointError: another job holds it.
        """
        storage.make_dirs(self.path)
        fd = self._try_lock()
        if fd is None:
            raise CheckpointError(
                f"{self.path} is in use by another job: {self._holder()}. One job at a time writes to a run folder; "
                f"stop that one or use another folder."
            )
        try:
            attempt = new_attempt()
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "attempt": attempt}
            storage.overwrite(fd, json.dumps(holder).encode())
            run = LockedRun(self.path, attempt, fd)
            run.clear_leftovers()
            yield run
        finally:
            storage.close(fd)

    def _try_lock(self) -> int | None:
        """The lock's descriptor; None if a living job has it. That of a dead one is waited for a moment."""
        deadline = time.monotonic() + _LAST_BREATH_SECONDS
        while (fd := storage.lock_exclusive(self.path / LOCK)) is None:
            if not self._holder_is_dead() or time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return fd

    def _holder_is_dead(self) -> bool:
        try:
            note = json.loads(self._holder())
            return note["host"] == socket.gethostname() and not Path(f"/proc/{int(note['pid'])}").exists()
        except (ValueError, TypeError, KeyError):
            return False

    def _holder(self) -> str:
        note = storage.read_small(self.path / LOCK, 4096).decode(errors="replace")
        return note if note.isprintable() else "unknown"


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

        A step of that number that does not count is moved to `step-N.bad-ATTEMPT`.

        Raises:
            CheckpointError: a good checkpoint of that step is there; it is never overwritten.
        """
        final = self.path / step_name(step)
        if final.exists():
            if _counts(final):
                raise CheckpointError(f"{final} is a good checkpoint and is not overwritten; use another run folder.")
            self._set_aside(final)
        folder = step_aside(self.path, step, self.attempt)
        storage.make_dirs(folder)
        return folder

    def clear_leftovers(self) -> None:
        """Removes what saves and prunings of dead attempts left: none but the lock's holder can be alive."""
        for name in storage.list_names(self.path):
            match = _LEFTOVER.fullmatch(name)
            if match and match["attempt"] != self.attempt:
                storage.remove_tree(self.path / name)

    def set_aside_bad(self) -> Newest:
        """The newest step that counts; those newer, which do not, are moved to `step-N.bad-ATTEMPT`."""
        found = self.newest()
        for step, path in self.steps():
            if found.checkpoint is None or step > found.checkpoint.step:
                self._set_aside(path)
        return found

    def fork(self, step: int) -> Path | None:
        """Moves every step newer than `step` to `forked-ATTEMPT/`; None if there is none.

        The newest goes first, so that a crash between leaves a run that ends at a step of its own.
        """
        newer = [path for number, path in reversed(self.steps()) if number > step]
        if not newer:
            return None
        older = [number for number, _ in self.steps() if number <= step]
        if older:
            self.point_latest(older[-1])
        else:
            storage.remove_file(self.path / LATEST)
        folder = self.path / f"forked-{self.attempt}"
        storage.make_dirs(folder)
        for path in newer:
            storage.rename(path, folder / path.name)
            storage.fsync_dir(folder)
            storage.fsync_dir(self.path)
        return folder

    def point_latest(self, step: int) -> None:
        """Has LATEST, a hint for people and scripts, name a step."""
        storage.replace_small(self.path / LATEST, f"{step_name(step)}\n".encode(), self.attempt)

    def prune(self, keep: int, keep_every: int = 0) -> list[Path]:
        """Removes old steps: all but the newest `keep` (at least 1) and those that `keep_every` divides (0: none).

        Only steps that count are counted or removed, so the newest good one always stays.

        Returns:
            The folders removed, oldest first.
        """
        left, old = max(keep, 1), []
        for step, path in reversed(self.steps()):
            if left == 0 and keep_every and step % keep_every == 0:
                continue
            if not _counts(path):
                continue
            if left:
                left -= 1
            else:
                old.append(path)
        for path in reversed(old):
            trash = path.with_name(f"{path.name}.trash-{self.attempt}")
            storage.rename(path, trash)
            storage.fsync_dir(self.path)  # else a power cut could bring the name back over what is half removed
            storage.remove_tree(trash)
        return old[::-1]

    def _set_aside(self, path: Path) -> None:
        storage.rename(path, path.with_name(f"{path.name}.bad-{self.attempt}"))
        storage.fsync_dir(self.path)


def _counts(path: Path) -> bool:
    try:
        Checkpoint.open_step(path)
    except CheckpointError:
        return False
    return True
