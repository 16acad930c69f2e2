"""The cores that this process may compute on: those of its affinity, and no more than its control group's time allows.

A container with `--cpus 2` on a machine of 64 cores sees all of them. With more threads than time, the system stops all
threads for the rest of each period, and those that wait for each other lose the most.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Returns how many threads can compute at a time, at least 1; a part of a core counts for none.

    Args:
        groups: where the control groups are mounted, of version 2, or of version 1 with a folder `cpu`.
        own: the file that names the groups of this process.
    """
    limits = [int(share) for share in _shares(groups, own)]
    return max(1, min([len(os.sched_getaffinity(0)), *limits]))


def _shares(groups: Path, own: Path) -> Iterator[float]:
    """Yields the cores' worth of time that each group around this process may use, where one is limited."""
    for line in (_text(own) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            root = groups if (groups / "cgroup.controllers").exists() else groups / "unified"
        elif "cpu" in controllers.split(","):
            root = groups / "cpu"
        else:
            continue
        # In a container the group may be named as outside of it, while its files are those of the mount itself.
        for folder in {root, *(root / part for part in _around(name))}:
            quota, _, period = (_text(folder / "cpu.max") or "").strip().partition(" ")
            if not quota:
                quota = (_text(folder / "cpu.cfs_quota_us") or "").strip()
                period = (_text(folder / "cpu.cfs_period_us") or "").strip()
            if quota.isdigit() and period.isdigit() and int(period):
                yield int(quota) / int(period)


def _around(name: str) -> Iterator[str]:
    """Yields a group's path below the mount, and those of the groups around it."""
    path = PurePosixPath(name.strip().lstrip("/"))
    if ".." not in path.parts:
        yield from map(str, (path, *path.parents))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
