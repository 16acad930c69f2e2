"""The lock of a run folder: one writing job at a time, also where the file system's locks end at the host.

The kernel's lock (flock) says who writes among the processes of a host, and of many hosts where the file system carries
locks to its server. Where it does not, the file itself does: its content says who holds it, and its time of change is a
heartbeat, which the holder renews. A job that finds the note of another host's job waits to see whether that beats; two
readings of one file are compared, never two hosts' clocks. A job that lost the lock all the same, because it stood
still for so long, finds another's note there and publishes and removes nothing any more.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, DamagedCheckpoint, StorageError
from ..files import locks, small_files, storage

LOCK: Final = "LOCK"
HEARTBEAT_SECONDS: Final = 5.0  # between two signs of life
HEARTBEAT_TIMEOUT_SECONDS: Final = 20.0  # without one, after which another host's job is dead
EXIT_TIMEOUT_SECONDS: Final = 10.0  # that the writer of a killed job may need to be gone too
SETTLE_SECONDS: Final = 1.0  # in which, where nothing else locks, the last of two notes written at once is seen by both
_NOTE_BYTES: Final = 512  # written at once, so that no reader sees half of it
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The job that a lock's note names; `boot` is the same for all processes under one kernel."""

    host: str
    pid: int
    attempt: str
    boot: str

    @staticmethod
    def here(attempt: str) -> "Holder":
        """This process."""
        return Holder(socket.gethostname(), os.getpid(), attempt, _boot())

    @staticmethod
    def of(run: Path) -> "Holder | None":
        """Who holds a run's lock by its note; None where that is empty, missing or none of ours."""
        try:
            note = json.loads(small_files.read_small(run / LOCK, 4096))
            return Holder(str(note["host"]), int(note["pid"]), str(note["attempt"]), str(note.get("boot", "")))
        except (DamagedCheckpoint, ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_bytes(self) -> bytes:
        """The note."""
        return json.dumps(asdict(self)).encode().ljust(_NOTE_BYTES)

    @property
    def is_here(self) -> bool:
        """Whether it ran under this kernel, whose own locks tell whether it lives."""
        return self.boot == _boot()

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended; a process that it started may hold the lock for a moment longer."""
        return self.is_here and not Path(f"/proc/{self.pid}").exists()

    def __str__(self) -> str:
        """For people."""
        text = f"process {self.pid} on host {self.host} (attempt {self.attempt})"
        return text if text.isprintable() else "an unknown process"


@contextmanager
def run_lock(run: Path, attempt: str) -> Iterator[int]:
    """Holds a run's lock while inside, with a heartbeat; its descriptor, for processes that shall hold it too.

    Raises:
        CheckpointError: another job holds it.
        StorageError: the file cannot be opened or locked.
    """
    fd = locks.open_lock(run / LOCK)
    try:
        _take(run, fd, attempt)
        try:
            with _heartbeat(fd):
                yield fd
        finally:
            _clear_note(run, fd, attempt)
    finally:
        storage.close(fd)


def require_lock(run: Path, attempt: str) -> None:
    """Raises CheckpointError where another job has taken the lock since `attempt` did."""
    holder = Holder.of(run)
    if holder and holder.attempt != attempt:
        raise CheckpointError(
            f"{run} has been taken over by another job: {holder}. This job (attempt {attempt}) sent no heartbeat for "
            f"{HEARTBEAT_TIMEOUT_SECONDS:.0f} s, or its {LOCK} file was removed. It writes no more to that folder; the "
            "steps committed before are whole."
        )


def _take(run: Path, fd: int, attempt: str) -> None:
    has_locks = _wait_for_kernel(run, fd)
    holder = Holder.of(run)
    if holder and not (has_locks and holder.is_here):
        _wait_for_silence(run, holder)
    locks.write_note(fd, Holder.here(attempt).to_bytes())
    if not has_locks:
        _log.warning("%s lies on a file system without locks; the heartbeat in it alone keeps others out.", run / LOCK)
        time.sleep(SETTLE_SECONDS)
        holder = Holder.of(run)
        if holder and holder.attempt != attempt:
            raise in_use(run, holder)


def _clear_note(run: Path, fd: int, attempt: str) -> None:
    with suppress(StorageError):  # without it, a job of another host waits for signs of life
        holder = Holder.of(run)
        if holder and holder.attempt == attempt:
            locks.write_note(fd, b"")


def _wait_for_kernel(run: Path, fd: int) -> bool:
    """Waits for the kernel's lock where its last holder is dying; whether there are such locks at all."""
    begun, logged = time.monotonic(), False
    while (got := locks.try_lock(fd)) is False:
        holder = Holder.of(run)
        waited = time.monotonic() - begun
        if not (holder and holder.is_gone) or waited > EXIT_TIMEOUT_SECONDS:
            raise in_use(run, holder)
        if waited > 1 and not logged:
            logged = True
            _log.warning("Waiting for the last processes of a job that has ended to leave %s: %s.", run, holder)
        time.sleep(0.01)
    return got is not None


def _wait_for_silence(run: Path, holder: Holder) -> None:
    """Returns if a job that may run elsewhere shows no sign of life, or ends; CheckpointError if it lives."""
    _log.warning(
        "%s was last used by %s, which has not said that it ended. Waiting %.0f s for a sign of life from it.",
        run, holder, HEARTBEAT_TIMEOUT_SECONDS,
    )  # fmt: skip
    seen, begun = locks.last_change(run / LOCK), time.monotonic()
    while time.monotonic() - begun < HEARTBEAT_TIMEOUT_SECONDS:
        time.sleep(HEARTBEAT_TIMEOUT_SECONDS / 40)
        if locks.last_change(run / LOCK) != seen:
            now = Holder.of(run)
            if now is None:
                return
            raise in_use(run, now)


def in_use(run: Path, holder: Holder | None) -> CheckpointError:
    """The error of a job that finds the lock held."""
    who = holder or f"one that fuser -v {run / LOCK} names"
    return CheckpointError(
        f"{run} is in use by another job: {who}. One job at a time writes to a run folder; stop that one or use "
        "another folder."
    )


@contextmanager
def _heartbeat(fd: int) -> Iterator[None]:
    """Renews the heartbeat while inside, from a thread that sleeps between: no step waits for it."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a server that does not answer now; the next beat comes
                locks.touch(fd)

    thread = threading.Thread(target=go_on, name="tk-run-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(HEARTBEAT_SECONDS)  # it may hang with its server


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:  # no Linux
        return socket.gethostname()
