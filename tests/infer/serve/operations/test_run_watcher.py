"""The choice of the next step, without processes."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tk.core.errors import TkError, WorkerDied
from tk.infer.engine.request.events import ModelInfo
from tk.infer.serve.errors import CannotReload, Draining
from tk.infer.serve.operations.run_watcher import RETRY_SECONDS, RunWatcher, watching
from tk.tests.infer.serve.fake_engine import INFO, WAIT_SECONDS


class Reloader:
    """Records the steps that it was asked for, and refuses some."""

    def __init__(self, run: Path) -> None:
        self.asked: list[int] = []
        self.errors: dict[int, TkError] = {}
        self.now = 100.0
        self.looked = threading.Event()
        self.watcher = RunWatcher(run, 10, self.reload, lambda: self.now)

    def reload(self, path: Path) -> ModelInfo:
        step = int(path.name.removeprefix("step-"))
        self.asked.append(step)
        self.looked.set()
        if step in self.errors:
            raise self.errors[step]
        return replace(INFO, step=step)

    def look(self) -> list[int]:
        """Returns the steps that one look asked for."""
        self.asked.clear()
        self.watcher.look()
        return list(self.asked)


@pytest.fixture
def reloader(tmp_path: Path) -> Reloader:
    return Reloader(tmp_path)


def commit(run: Path, *steps: int) -> None:
    for step in steps:
        (run / f"step-{step:08d}").mkdir()


def test_the_newest_step_is_served_once_and_older_ones_never(reloader: Reloader, tmp_path: Path) -> None:
    commit(tmp_path, 9, 10)
    assert reloader.look() == []
    commit(tmp_path, 11, 12)
    assert reloader.look() == [12]
    assert reloader.look() == []
    commit(tmp_path, 13)
    assert reloader.look() == [13]


def test_a_refused_step_gives_way_to_the_one_before_and_is_tried_again_when_it_changed(
    reloader: Reloader, tmp_path: Path
) -> None:
    commit(tmp_path, 11, 12)
    reloader.errors[12] = CannotReload("damaged")
    assert reloader.look() == [12, 11]
    assert reloader.look() == []
    os.utime(tmp_path / "step-00000012", (1, 1))
    assert reloader.look() == [12]
    reloader.errors.clear()
    os.utime(tmp_path / "step-00000012", (2, 2))
    assert reloader.look() == [12]
    assert reloader.look() == []


def test_after_a_failure_of_the_machine_looks_pause(reloader: Reloader, tmp_path: Path) -> None:
    commit(tmp_path, 11, 12)
    reloader.errors[12] = WorkerDied("killed")
    assert reloader.look() == [12]
    reloader.now += RETRY_SECONDS - 1
    assert reloader.look() == []
    reloader.errors.clear()
    reloader.now += 2
    assert reloader.look() == [12]


def test_looks_end_with_the_block_and_when_the_server_shuts_down(
    reloader: Reloader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tk.infer.serve.operations.run_watcher.LOOK_SECONDS", 0.01)
    commit(tmp_path, 11)
    reloader.errors[11] = Draining("ends")
    with watching(reloader.watcher):
        assert reloader.looked.wait(WAIT_SECONDS)
    assert reloader.asked == [11]
    with watching(Reloader(tmp_path / "missing").watcher):
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("tk-follow") == 1
    assert "tk-follow" not in [thread.name for thread in threading.enumerate()]
