"""States on disk when the disk fails, or the run is killed: a report in time, and nothing is lost or left."""

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import TkError
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer, run_training
from tk.tests.train.test_offload import same_bits
from tk.tests.train.train_processes import DEADLINE, wait_for_step

SECTIONS: dict[str, Any] = {
    "train": {"steps": 6, "global_batch_size": 7},
    "precision": {"params": "bf16"},
    "zero": {"stage": 3},
    "checkpoint": {"every": 2},
}
FAULTS = {
    "a read that ends early": ("preadv", 0, r"ends at byte \d+"),
    "a read with EIO": ("preadv", errno.EIO, "Input/output error"),
    "a write with ENOSPC": ("pwrite", errno.ENOSPC, "No space left on device"),
    "a write with EIO": ("pwrite", errno.EIO, "Input/output error"),
}
FAULTY_STEP = 3


def all_on_disk(folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return dict.fromkeys(("optimizer", "gradients", "parameters"), "disk") | {"folder": str(folder)}


class Disk:
    """The operations on files without a name that come after step FAULTY_STEP - 1; number `index` of a kind fails."""

    def __init__(self, name: str, number: int, index: int) -> None:
        self.name, self.number, self.index = name, number, index
        self.count, self.last, self.failed_after, self.is_counting = 0, 0, 0, False

    def on_step(self, step: int, result: object) -> None:
        self.last = step
        self.is_counting = step >= FAULTY_STEP - 1

    @contextmanager
    def failing(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, self.name, self._in_place_of(getattr(os, self.name)))
            yield

    def _in_place_of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *arguments: Any, **options: Any) -> Any:
            if self.is_counting and "(deleted)" in os.readlink(f"/proc/self/fd/{fd}"):
                self.count += 1
                if self.count - 1 == self.index:
                    self.failed_after = self.last
                    if self.number:
                        raise OSError(self.number, os.strerror(self.number))
                    return 0
            return real(fd, *arguments, **options)

        return call


def fails(config: dict[str, Any], disk: Disk) -> str:
    """Trains until the disk fails; returns the error, or "" if it did not."""
    trainer = make_trainer(config, on_step=disk.on_step)
    with disk.failing():
        try:
            trainer.fit()
        except TkError as error:
            return str(error)
    return ""


@pytest.mark.every(4)
@pytest.mark.parametrize("places", [1, pytest.param(1000, marks=[pytest.mark.matrix, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_disk_that_fails_ends_the_run_in_time_and_it_goes_on_with_the_same_bits(
    configure: Configure, tmp_path: Path, kind: str, places: int
) -> None:
    """The disk fails at `places` operations from step FAULTY_STEP on, one run each, or at all of them."""
    name, number, message = FAULTS[kind]
    run_training(configure("whole", **SECTIONS))
    folder = tmp_path / "states"
    counted = Disk(name, number, -1)
    sections = SECTIONS | {"train": SECTIONS["train"] | {"steps": FAULTY_STEP}, "offload": all_on_disk(folder)}
    assert fails(configure("counted", **sections), counted) == ""
    assert counted.count > 4
    for index in random.Random(kind).sample(range(counted.count), min(places, counted.count)):
        config = configure(f"failed-{index}", **SECTIONS, offload=all_on_disk(folder))
        disk = Disk(name, number, index)
        found = fails(config, disk)
        assert found, f"operation {index} of {counted.count} was not seen to fail"
        assert disk.last <= disk.failed_after + 1, "the step after it was the last one"
        run = tmp_path / f"failed-{index}"
        assert list(folder.iterdir()) == []
        assert all(Checkpoint.open(path).verify().ok for path in run.glob("step-????????"))
        run_training(config)
        same_bits(Checkpoint.open(run), Checkpoint.open(tmp_path / "whole"))
        assert re.search(message, found), found


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=[pytest.mark.matrix, pytest.mark.timeout(3600)])])
def test_a_run_that_is_killed_goes_on_with_the_bits_of_an_undisturbed_one(
    rank_pool: RankPool,
    configure: Configure,
    write_toml: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the pool's ranks have
    folder, rng = tmp_path / "states", random.Random(kills)
    sections = SECTIONS | {"parallel": {"dp": 2}, "train": SECTIONS["train"] | {"steps": 12 + 4 * kills}}
    rank_pool.run(run_training, 2, config=configure("whole", **sections))
    config = configure("killed", **sections, offload=all_on_disk(folder))
    path = write_toml(config)
    for number in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tk", "train", str(path)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
        steps = [step.name for step in (tmp_path / "killed").glob("step-????????")]
        reached = int(max(steps)[-8:]) if steps else 0
        wait_for_step(tmp_path / "killed", reached + 1 + rng.randrange(4), process)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE)
        assert list(folder.iterdir()) == [], f"kill {number} left something"
    rank_pool.run(run_training, 2, config=config)
    same_bits(Checkpoint.open(tmp_path / "killed"), Checkpoint.open(tmp_path / "whole"))
