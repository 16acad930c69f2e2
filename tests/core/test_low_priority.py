"""Threads of low priority: they alone have it, and their results and errors are those of the work."""

import os
import threading

import pytest

from tk.core.low_priority import NICENESS, at_low_priority, lower_priority


def priority() -> tuple[int, int]:
    """Returns the niceness of this thread, and its number."""
    thread = threading.get_native_id()
    return os.getpriority(os.PRIO_PROCESS, thread), thread


def test_work_has_a_thread_of_its_own_whose_priority_is_low() -> None:
    before, mine = priority()
    niceness, thread = at_low_priority(priority)
    assert (niceness, thread != mine) == (max(NICENESS, before), True)
    assert priority() == (before, mine)


def test_a_lower_priority_is_kept() -> None:
    def lower_twice() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS + 5)
        lower_priority()
        return priority()[0]

    assert at_low_priority(lower_twice) == NICENESS + 5


def test_an_error_is_raised_where_the_work_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)
