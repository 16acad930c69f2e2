"""Interrupted at every operation: killed, out of space, failing disk, power cut. Committed steps stay.

`make test` tries every operation or some of them (see `SOME`), `make test-all` every one in each scenario.
"""

import errno
import inspect
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import TkError
from tk.tests.checkpoint import crash_job, random_kill_job
from tk.tests.checkpoint.crashing import SCENARIOS, Scenario, act_as_if_large
from tk.tests.checkpoint.faults import CHANGES, LOOKS, MADE_OF_CHANGES, MODULES, AtOperation, Disk, Survives, watched

# (scenario, stride): of its operations each `stride`-th is tried. An odd stride meets both kinds of errors.
ALL = [pytest.param(name, 1, marks=pytest.mark.matrix, id=f"{name}, all") for name in SCENARIOS]
SOME = [pytest.param(name, 9 if name == "save and prune" else 17, id=name) for name in SCENARIOS]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture(autouse=True)
def small_steps_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    act_as_if_large(monkeypatch.setattr)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory where there is such: the test is about the order of operations, not the disk's speed."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def test_every_operation_of_storage_is_known() -> None:
    functions = sorted(
        name
        for module in MODULES
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__
    )
    assert functions == sorted((*CHANGES, *LOOKS, *MADE_OF_CHANGES)), "each is known, and no two have one name"


@pytest.mark.parametrize(("name", "stride"), [*SOME, *ALL])
def test_killed_at_every_operation(scratch: Path, name: str, stride: int) -> None:
    job = [sys.executable, crash_job.__file__, name, str(scratch), str(stride)]
    done = subprocess.run(job, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


@pytest.mark.parametrize(("name", "stride"), [*SOME, *ALL])
def test_an_error_at_every_operation(scratch: Path, name: str, stride: int, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk at every second one, a failing one at the others; test_storage_errors.py has more kinds of errors.

    An error of pruning is logged, any other one is raised.
    """
    scenario = SCENARIOS[name]
    scenario.prepare(scratch / "before")
    index = 0
    while True:
        shutil.copytree(scratch / "before", scratch / "now")
        number = (errno.ENOSPC, errno.EIO)[index % 2]
        fault = AtOperation(index, partial(_fail, number))
        reported = [0]
        failed = False
        caplog.clear()
        with watched(fault):
            try:
                scenario.run(scratch / "now", reported.append)
            except OSError as error:
                failed = error.errno == number
        assert (failed or bool(caplog.records)) == fault.reached, "an error was swallowed or another one came of it"
        scenario.check(scratch / "now", reported[-1])
        shutil.rmtree(scratch / "now")
        if not fault.reached:
            break
        index += stride
    assert index > 10


def _fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


# A fork moves steps between folders, which "anything survives" does not do in one go, as real disks do.
CUTS = [
    pytest.param(name, survives, stride, marks=marks, id=f"{name}-{survives}-{stride}")
    for stride, marks in ((13, ()), (1, pytest.mark.matrix))
    for survives in ("only synced data", "all names", "anything")
    for name in SCENARIOS
    if (name, survives) != ("fork", "anything")
]

# After these operations a cut leaves the same as a cut before them.
UNSEEN: dict[Survives, tuple[str, ...]] = {
    "only synced data": tuple(name for name in (*CHANGES, "close") if name not in ("fsync", "fsync_dir")),
    "all names": ("close", "pwrite"),
    "anything": ("close",),
}


@pytest.mark.parametrize(("name", "survives", "stride"), CUTS)
def test_power_cut_after_every_operation(scratch: Path, name: str, survives: Survives, stride: int) -> None:
    scenario = SCENARIOS[name]
    scenario.prepare(scratch / "now")
    cut_everywhere(scratch, scenario, survives, Disk(scratch / "now"), stride)


def cut_everywhere(scratch: Path, scenario: Scenario, survives: Survives, disk: Disk, stride: int = 1) -> None:
    """Runs a scenario in scratch / "now"; checks the state after each `stride`-th power cut that differs."""
    reports: list[tuple[int, int]] = []
    with disk.recording():
        scenario.run(disk.base, lambda number: reports.append((len(disk.log), number)))
    rng = random.Random(len(disk.log))
    cuts = seen = 0
    for cuts, _ in enumerate(disk.replay(), 1):
        if disk.log[cuts - 1][0] in UNSEEN[survives]:
            continue
        seen += 1
        if seen % stride:
            continue
        disk.write_to(scratch / "cut", survives, rng)
        reported = max((number for at, number in reports if at <= cuts), default=0)
        try:
            scenario.check(scratch / "cut", reported)
        except BaseException as error:
            error.add_note(f"after operation {cuts} of {len(disk.log)}: {disk.log[cuts - 1]}")
            raise
        shutil.rmtree(scratch / "cut")
    assert cuts > 10
    disk.write_to(scratch / "end", "everything", rng)
    assert _tree(scratch / "end") == _tree(disk.base), "the model of the disk has lost touch"


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("operation", "of", "survives"),
    [
        ("fsync", "", "all names"),
        ("fsync_dir", "", "only synced data"),
        ("fsync_dir", "run", "only synced data"),
        ("fsync_dir", "run", "anything"),
        ("fsync_dir", "parts", "only synced data"),
        ("fsync_dir", "tmp-", "only synced data"),
    ],
)
def test_a_missing_fsync_is_seen(scratch: Path, operation: str, of: str, survives: Survives) -> None:
    """The test of the tests: on a disk that only pretends to sync, a save must be found wanting."""
    scenario = SCENARIOS["save and prune"]
    scenario.prepare(scratch / "now")

    def lies(name: str, arguments: tuple[Any, ...]) -> bool:
        return name == operation and of in getattr(arguments[0], "name", "")

    with pytest.raises((AssertionError, TkError, OSError)):
        cut_everywhere(scratch, scenario, survives, Disk(scratch / "now", lies))


def _tree(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in files.items() if not name.endswith("LOCK")}


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=[pytest.mark.matrix, pytest.mark.timeout(1200)])])
def test_killed_at_random_times_while_saving_in_the_background(scratch: Path, kills: int) -> None:
    rng = random.Random()
    reported = 0
    for _ in range(kills):
        reported = _kill_after(scratch, rng.uniform(0.0, 0.4), reported)
        SCENARIOS["save and prune"].check(scratch, reported)
    assert reported >= kills, "each job has committed a step before it is killed"


def _kill_after(folder: Path, seconds: float, reported: int) -> int:
    """Runs the job, kills its rank, and returns the last step that it reported as committed."""
    job = subprocess.Popen(
        [sys.executable, random_kill_job.__file__, str(folder / "run")],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert job.stdout is not None
    timer = threading.Timer(seconds, job.kill)
    for line in job.stdout:
        if not timer.ident:
            timer.start()  # from the first commit on
        reported = int(line)
    timer.join()
    job.communicate()
    assert job.returncode == -signal.SIGKILL
    return reported
