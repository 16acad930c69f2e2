"""An update on a thread: a bucket is waited for by itself, and an error reaches all that wait."""

import threading
from collections.abc import Iterator

import pytest

from tk.core.errors import StorageError
from tk.train.zero.running_update import NO_UPDATES, RunningUpdate

SECONDS = 60.0


def test_a_bucket_is_ready_while_later_ones_are_not() -> None:
    go_on = threading.Event()

    def work() -> Iterator[int]:
        yield 2
        assert go_on.wait(SECONDS)
        yield 1

    running = RunningUpdate(work, [2, 1])
    running.wait(2)
    assert (running.has_ended(2), running.has_ended(1)) == (True, False)
    go_on.set()
    running.wait(1)
    running.join()
    assert running.has_ended(1)


def test_an_error_reaches_all_that_wait_each_time() -> None:
    def work() -> Iterator[int]:
        yield 0
        raise StorageError("the disk is full")

    running = RunningUpdate(work, [0, 1])
    for _ in range(2):
        with pytest.raises(StorageError, match="the disk is full"):
            running.wait(1)
        with pytest.raises(StorageError, match="the disk is full"):
            running.join()


def test_without_updates_nothing_is_waited_for() -> None:
    NO_UPDATES.ensure(0)
    assert NO_UPDATES.is_updated(0)
