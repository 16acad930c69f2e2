"""A run folder: its steps, which of them count, the lock that keeps a second writer out, and pruning."""

import json
import os
import re
import secrets
import socket
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
_LEFTOVER: Final = re.compile(r"step-\d{8,}\.(tmp|trash)-([0-9a-z-]+)")


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

        The lock is the kernel's, so a dead job's is free at once; the file's content says who holds it.

        Raises:
            CheckpointError: another job holds it.
        """
        storage.make_dirs(self.path)
        fd = storage.lock_exclusive(self.path / LOCK)
        if fd is None:
            raise CheckpointError(
                f"{self.path} is in use by another job: {self._holder()}. One job at a time writes to a run folder; "
                f"stop that one or use another folder."
            )
        try:
            attempt = new_attempt()
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "attempt": attempt}
            storage.overwrite(fd, json.dumps(holder).encode())
            run = LockedRun(self.path, attempt)
            run.clear_leftovers()
            yield run
        finally:
            storage.close(fd)

    def _holder(self) -> str:
        note = storage.read_small(self.path / LOCK, 4096).decode(errors="replace")
        return note if note.isprintable() else "unknown"


class LockedRun(RunFolder):
    """A run folder whose lock this process holds.

    Attributes:
        attempt: this start's name; a job's other ranks get it by broadcast.
    """

    def __init__(self, path: Path, attempt: str) -> None:
        super().__init__(path)
        self.attempt = attempt

    def begin_step(self, step: int) -> Path:
        """The folder in which every rank writes its part of a step, aside until it is committed.

        A step of that number that does not count is moved to `step-N.bad-ATTEMPT`.

        Raises:
            CheckpointError: a good checkpoint of that step is there; it is never overwritten.
        """
        final = self.path / step_name(step)
        if final.exists():
            try:
                Checkpoint.open_step(final)
            except CheckpointError:
                storage.rename(final, final.with_name(f"{final.name}.bad-{self.attempt}"))
            else:
                raise CheckpointError(f"{final} is a good checkpoint and is not overwritten; use another run folder.")
        folder = step_aside(self.path, step, self.attempt)
        storage.make_dirs(folder)
        return folder

    def clear_leftovers(self) -> None:
        """Removes what saves and prunings of dead attempts left: none but the lock's holder can be alive."""
        for name in storage.list_names(self.path):
            match = _LEFTOVER.fullmatch(name)
            if match and match[2] != self.attempt:
                storage.remove_tree(self.path / name)

    def prune(self, keep: int, keep_every: int = 0) -> list[Path]:
        """Removes old steps: all but the newest `keep` (at least 1) and those that `keep_every` divides (0: none).

        Only steps that count are counted or removed, so the newest good one always stays.

        Returns:
            The folders removed.
        """
        good = []
        for step, path in self.steps():
            try:
                Checkpoint.open_step(path)
            except CheckpointError:
                continue
            good.append((step, path))
        old = [path for step, path in good[: -max(keep, 1)] if not (keep_every and step % keep_every == 0)]
        for path in old:
            trash = path.with_name(f"{path.name}.trash-{self.attempt}")
            storage.rename(path, trash)
            storage.remove_tree(trash)
        return old
