"""Errors of the system name the file, never count as damage, and move no good step."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder
from tk.checkpoint.files import storage
from tk.checkpoint.read.shared_read import ALONE
from tk.core.errors import StorageError, TkError
from tk.tests.checkpoint.crashing import save
from tk.tests.checkpoint.faults import FailingSystem
from tk.train.saving.resume import Start

ERRNOS = [
    errno.EACCES, errno.ESTALE, errno.EMFILE, errno.EIO, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EINTR,
    errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.ENXIO,
]  # fmt: skip

GOOD = ["step-00000001", "step-00000002", "step-00000003"]

NOBODY = 65534
# Of the calls each `stride`-th fails; a stride of five meets every errno.
EVERY = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.matrix)])


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder that any user may enter, in memory where there is such."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def run(scratch: Path) -> Path:
    """Three good steps, a newer one that is damaged, and the leftovers of dead jobs."""
    run = scratch / "run"
    save(run, range(1, 5), keep=0)
    (run / "step-00000004" / "COMMIT").unlink()
    shutil.copytree(run / "step-00000001", run / "step-00000005.tmp-0000dead")
    shutil.copytree(run / "step-00000001", run / "step-00000000.trash-0000dead")
    return run


def read_all(checkpoint: Checkpoint) -> int:
    for tensor, slot in checkpoint.chunks:
        checkpoint.read(tensor, slot=slot)
    checkpoint.side_files()
    return checkpoint.step


def read_newest(run: Path) -> None:
    assert read_all(Checkpoint.open(run)) == 3


def resume(run: Path) -> None:
    with RunFolder(run).lock() as locked:
        assert Start(locked, run, read_all, ALONE, int).from_newest() == 3


def fork(run: Path) -> None:
    with RunFolder(run).lock() as locked:
        start = Start(locked, run, read_all, ALONE, int)
        assert start.from_given(run / "step-00000002", fork=True) == 2


def remove_old(run: Path) -> None:
    with RunFolder(run).lock() as locked:
        assert locked.prune(keep=2) in ([run / "step-00000001"], [])  # what fails is logged, and ends no training


def begin(run: Path) -> None:
    with RunFolder(run).lock() as locked:
        locked.begin_step(4)


JOBS: list[tuple[Callable[[Path], None], list[str]]] = [
    (read_newest, GOOD),
    (resume, GOOD),
    (begin, GOOD),
    (remove_old, GOOD[1:]),
]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(job: Callable[[Path], None], folder: Path, system: FailingSystem) -> TkError | None:
    """The error that a job ends with, if it does."""
    try:
        with system.beneath_storage():
            job(folder)
    except TkError as error:
        return error
    return None


@pytest.mark.every(2)
@EVERY
@pytest.mark.parametrize(("job", "stays"), JOBS, ids=lambda value: getattr(value, "__name__", ""))
def test_no_errno_at_any_call_counts_as_damage(
    run: Path, scratch: Path, job: Callable[[Path], None], stays: list[str], stride: int
) -> None:
    """Calls to the system that opening, reading, resuming, saving and pruning make fail in turn, every other time with
    all calls after it."""
    before = {name: content(run / name) for name in stays}
    index = 0
    while True:
        shutil.copytree(run, scratch / "now", symlinks=True)
        system = FailingSystem(index, ERRNOS[index % len(ERRNOS)], lasting=index % 2 == 1)
        ended = outcome(job, scratch / "now", system)
        assert ended is None or isinstance(ended, StorageError), (system.failed, system.number)
        if ended:
            assert str(scratch / "now") in str(ended), "it names the file"
            assert os.strerror(system.number) in str(ended), system.failed
        for name, files in before.items():
            assert content(scratch / "now" / name) == files, (system.failed, system.number)
        shutil.rmtree(scratch / "now")
        if not system.failed:
            break
        index += stride
    assert index > 40


@EVERY
def test_a_fork_that_fails_anywhere_loses_no_step(run: Path, scratch: Path, stride: int) -> None:
    index = 0
    while True:
        shutil.copytree(run, scratch / "now")
        system = FailingSystem(index, errno.EIO)
        ended = outcome(fork, scratch / "now", system)
        assert ended is None or isinstance(ended, StorageError), (system.failed, system.number)
        for name in GOOD:
            (path,) = [*scratch.glob(f"now/{name}"), *scratch.glob(f"now/forked-*/{name}")]
            assert content(path) == content(run / name)
        shutil.rmtree(scratch / "now")
        if not system.failed:
            break
        index += stride


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read everything, so the test takes the user id of `nobody`; permissions stop other users anyway."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["COMMIT", "manifest.json", "parts", "parts/00001.json", "model-00001.safetensors", "config.json", "."]
)
def test_a_step_that_this_user_may_not_read_stops_the_start(run: Path, name: str) -> None:
    shut = run / "step-00000003" / name
    for path in [run, *run.rglob("*")]:
        path.chmod(0o777)
    shut.chmod(0)
    names = sorted(os.listdir(run))
    try:
        for job in (read_newest, resume):
            with as_another_user(), pytest.raises(StorageError, match=r"Permission denied .*needs the right") as raised:
                job(run)
            assert str(shut) in str(raised.value)
        kept = sorted(os.listdir(run))
        assert [name for name in names if ".t" not in name] == kept, "only the leftovers of dead jobs are removed"
    finally:
        shut.chmod(0o755)


def test_a_folder_that_was_moved_is_named_as_a_cause(scratch: Path) -> None:
    """A run folder may be moved while its job trains."""
    message = "cannot be made: No such file .*If its folder was not moved or removed meanwhile: the disk or the network"
    with pytest.raises(StorageError, match=message):
        storage.open_new(scratch / "moved" / "file")
