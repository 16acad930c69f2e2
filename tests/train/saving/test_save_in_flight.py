"""A save that is waited for on a thread: when `wait` returns, and its errors."""

import threading

import pytest

from tk.core.errors import TkError
from tk.train.saving.save_in_flight import SaveInFlight


def test_wait_returns_when_the_save_is_done() -> None:
    go, done = threading.Event(), []

    def finish() -> None:
        assert go.wait(60)
        done.append(threading.current_thread().name)

    save = SaveInFlight(finish)
    assert not done
    go.set()
    save.wait()
    assert done == ["tk-save"]


def test_wait_raises_the_error_of_the_save() -> None:
    def finish() -> None:
        raise TkError("the disk is full")

    with pytest.raises(TkError, match="the disk is full"):
        SaveInFlight(finish).wait()
