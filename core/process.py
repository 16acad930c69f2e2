"""What a process asks of the system at its start: to end with its starter, to keep the memory that it has."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when the thread that started it ends; Linux only.

    Args:
        parent: process id of the starter; if it is gone already, this process ends here and now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


def keep_freed_memory() -> None:
    """Has glibc keep what this process frees for its next allocations.

    By default large blocks go back to the system, which clears every page anew when the next layer asks for as much: a
    fifth of a training step on a CPU. Where malloc is not glibc's, nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
