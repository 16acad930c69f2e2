"""What /proc says of processes that may end while it is read."""

import os
from contextlib import suppress
from pathlib import Path


def child_ids(process: int | None = None) -> list[int]:
    """Returns the children of all threads of a process, this one's by default; none of one that has ended."""
    folder, found = f"/proc/{process or 'self'}/task", list[int]()
    with suppress(OSError):
        for thread in os.listdir(folder):
            with suppress(OSError):  # the thread has ended
                found += map(int, Path(folder, thread, "children").read_text().split())
    return found


def command_of(process: int) -> bytes:
    """Returns the words of a process's command; none of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def has_ended(process: int) -> bool:
    """Returns whether there is no such process, or a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
