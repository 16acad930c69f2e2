"""The lock of a run folder: one writing job at a time, even if the file system's locks work on one host only.

The kernel's lock (flock) excludes other processes of the host, and of other hosts if the file system sends locks to its
server. If it does not, the LOCK file itself is the lock: its content, the note, names the holder, and its time of
change is a heartbeat that the holder renews. A job that finds the note of another host's job waits for a heartbeat; it
compares two readings of one file, never the clocks of two hosts. A job that paused so long that it lost the lock finds
another job's note, and then publishes and removes nothing.
"""

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, DamagedCheckpoint, StorageError
from ..files import locks, small_files, storage

LOCK: Final = "LOCK"
HEARTBEAT_SECONDS: Final = 5.0  # between two heartbeats
HEARTBEAT_TIMEOUT_SECONDS: Final = 20.0  # without a heartbeat, after which a job of another host counts as dead
EXIT_TIMEOUT_SECONDS: Final = 10.0  # for the writer processes of a killed job to end
SETTLE_SECONDS: Final = 1.0  # after which two jobs that wrote notes at once both see the last one; without flock only
_NOTE_BYTES: Final = 512  # the note is padded and written in one call, so that no reader sees half of it
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
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
        """Returns the holder that a run's note names; None if the note is empty, missing or not valid."""
        try:
            note = json.loads(small_files.read_small(run / LOCK, 4096))
            return Holder(str(note["host"]), int(note["pid"]), str(note["attempt"]), str(note.get("boot", "")))
        except (DamagedCheckpoint, ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_bytes(self) -> bytes:
        """Returns the note's bytes."""
        return json.dumps(asdict(self)).encode().ljust(_NOTE_BYTES)

    @property
    def is_here(self) -> bool:
        """Whether the job ran under this kernel, whose locks show whether it is alive."""
        return self.boot == _boot()

    @property
    def is_gone(self) -> bool:
        """Whether the job's process has ended; its writer processes may hold the lock for a moment longer."""
        return self.is_here and not Path(f"/proc/{self.pid}").exists()

    def __str__(self) -> str:
        """Returns the holder for messages."""
        text = f"process {self.pid} on host {self.host} (attempt {self.attempt})"
        return text if text.isprintable() else "an unknown process"


@contextmanager
def run_lock(run: Path, attempt: str, make_room: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Holds a run's lock, with a heartbeat; yields its descriptor, which child processes inherit to hold it too.

    Args:
        run: the run folder.
        attempt: the name of this start of a job.
        make_room: removes what dead attempts have left; called under the lock if a full disk has no room for the note.

    Raises:
        CheckpointError: another job holds it.
        StorageError: the file cannot be opened or locked.
    """
    fd = locks.open_lock(run / LOCK)
    try:
        _take(run, fd, attempt, make_room)
        try:
            with _heartbeat(fd):
                yield fd
        finally:
            _clear_note(run, fd, attempt)
    finally:
        storage.close(fd)


def require_lock(run: Path, attempt: str) -> None:
    """Raises CheckpointError if another job has taken the lock since `attempt` took it."""
    holder = Holder.of(run)
    if holder and holder.attempt != attempt:
        raise CheckpointError(
            f"{run} has been taken over by another job: {holder}. This job (attempt {attempt}) sent no heartbeat for "
            f"{HEARTBEAT_TIMEOUT_SECONDS:.0f} s, or its {LOCK} file was removed. It writes no more to that folder; the "
            "steps committed before are whole."
        )


def _take(run: Path, fd: int, attempt: str, make_room: Callable[[], None]) -> None:
    has_locks = _wait_for_kernel(run, fd)
    holder = Holder.of(run)
    if holder and not (has_locks and holder.is_here):
        _wait_for_silence(run, holder)
    note = Holder.here(attempt).to_bytes()
    try:
        locks.write_note(fd, note)
    except StorageError as error:
        if error.errno not in _FULL:
            raise
        make_room()
        locks.write_note(fd, note)
    if not has_locks:
        _log.warning("%s lies on a file system without locks; only its heartbeat keeps other jobs out.", run / LOCK)
        time.sleep(SETTLE_SECONDS)
        holder = Holder.of(run)
        if holder and holder.attempt != attempt:
            raise in_use(run, holder)


def _clear_note(run: Path, fd: int, attempt: str) -> None:
    with suppress(StorageError):  # if this fails, the next job on another host waits for a heartbeat
        holder = Holder.of(run)
        if holder and holder.attempt == attempt:
            locks.write_note(fd, b" " * _NOTE_BYTES)  # the file keeps its place on a disk that fills up


def _wait_for_kernel(run: Path, fd: int) -> bool:
    """Takes the kernel's lock, and waits if its last holder is ending; returns whether the file system has locks."""
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
    """Returns if a job that may run on another host sends no heartbeat, or ends; CheckpointError if it is alive."""
    _log.warning(
        "%s was last used by %s, which has not recorded its end. Waiting %.0f s for a heartbeat from it.",
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
    """Makes the error of a job that finds the lock held."""
    who = holder or f"an unknown process (fuser -v {run / LOCK} names it)"
    return CheckpointError(
        f"{run} is in use by another job: {who}. Only one job at a time may write to a run folder: stop that job, or "
        "use another folder."
    )


@contextmanager
def _heartbeat(fd: int) -> Iterator[None]:
    """Renews the heartbeat from a thread of its own, so that no training step waits for the file system."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # the server does not answer now; the next heartbeat may succeed
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
