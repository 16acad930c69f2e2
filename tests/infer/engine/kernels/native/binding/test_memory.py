"""Memory begins where it should, is not shared by parts, and may be committed in large pages."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tk.core.casts import Array
from tk.infer.engine.kernels.native.binding.memory import CACHE_LINE, LARGE_PAGE, Arena, aligned, lazy


def flags_of(memory: Array) -> list[str]:
    """Returns the kernel's flags of the mapping that holds an array (proc_pid_smaps(5))."""
    address, holds = memory.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            low, high = (int(each, 16) for each in name.split("-"))
            holds = low <= address < high
        elif holds and name == "VmFlags:":
            return rest
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has smaps")
def test_large_memory_may_have_large_pages() -> None:
    large = Arena(3 * LARGE_PAGE).take(LARGE_PAGE)
    assert large.ctypes.data % LARGE_PAGE == 0
    assert "hg" in flags_of(large)  # huge pages are advised ...
    assert "sh" not in flags_of(large)  # ... and memory that is shared would not get them
    assert "hg" not in flags_of(lazy(LARGE_PAGE))


@pytest.mark.parametrize("num_bytes", [1, 64, 1000, LARGE_PAGE - 1, LARGE_PAGE, 3 * LARGE_PAGE + 5])
def test_memory_is_zero_and_begins_on_a_cache_line(num_bytes: int) -> None:
    for memory in (aligned(num_bytes), lazy(num_bytes), lazy(num_bytes, large_pages=True)):
        assert memory.shape == (num_bytes,)
        assert memory.ctypes.data % CACHE_LINE == 0
        assert not memory.any()
        memory[:] = 1


def test_parts_of_an_arena_are_apart() -> None:
    sizes = (1, 64, 65, 5000, 0, 128)
    arena = Arena(sum(-(-size // CACHE_LINE) * CACHE_LINE for size in sizes))
    parts = [arena.take(size) for size in sizes]
    for number, part in enumerate(parts, 1):
        assert part.ctypes.data % CACHE_LINE == 0
        part[:] = number
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True), 1):
        assert part.shape == (size,)
        assert np.all(part == number)
