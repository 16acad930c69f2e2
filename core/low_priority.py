"""Work that other threads go before: what a server reads and checks while it computes answers."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")
# Such a thread gets a tenth of a core that another one wants; with less, it could hold Python's lock for long.
NICENESS: Final = 10


def lower_priority() -> None:
    """Lowers the priority of the calling thread alone, for good: an ordinary user cannot raise one."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def at_low_priority(work: Callable[[], T]) -> T:
    """Does work on a thread of its own at low priority, waits for it, and returns its result or raises its error."""
    with ThreadPoolExecutor(1, "tk-low", lower_priority) as thread:
        return thread.submit(work).result()
