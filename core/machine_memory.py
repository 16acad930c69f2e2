"""The memory of this machine, or of this container, without torch."""

from pathlib import Path
from typing import Final

CONTROL_GROUP: Final = Path("/sys/fs/cgroup")  # the control group of a container
MEMINFO: Final = Path("/proc/meminfo")


def machine_memory(group: Path = CONTROL_GROUP, meminfo: Path = MEMINFO) -> int:
    """Returns the most bytes that processes can use at once: memory and swap, or the limit of the container."""
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in meminfo.read_text(encoding="ascii").splitlines()
        if line.startswith(("MemTotal:", "SwapTotal:"))
    }
    total = sum(sizes.values())
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def free_memory(group: Path = CONTROL_GROUP) -> int:
    """Returns the number of bytes that this machine, or this container, can still allocate."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used, stat = (
            (group / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current", "stat")
        )
    except OSError:
        return free
    sizes = {name: int(size) for name, size in (line.split() for line in stat.splitlines())}
    cached = sizes["active_file"] + sizes["inactive_file"]  # counted as used, but the kernel frees it on demand
    return free if limit == "max" else min(free, max(0, int(limit) - int(used) + cached))
