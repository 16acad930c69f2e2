"""What a process does about the one that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when the thread that started it ends; Linux only.

    Args:
        parent: process id of the starter; if it is gone already, this process ends here and now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)
