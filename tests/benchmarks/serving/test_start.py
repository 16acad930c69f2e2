"""The memory of a process and of what it started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tk.benchmarks.serving.start import descendants, measure_start, rolled_up

NESTED = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"])
print(child.pid, flush=True)
child.wait()
"""


def test_descendants_are_all_that_a_process_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NESTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert list(descendants(parent.pid)) == [parent.pid, child]
        parent.communicate("\n")


def test_memory_is_in_bytes() -> None:
    before = rolled_up(os.getpid(), "Rss")
    held = bytearray(os.urandom(1)) * 2**26
    grown = rolled_up(os.getpid(), "Rss") - before
    assert 0.9 * len(held) < grown < 1.2 * len(held)
    assert rolled_up(os.getpid(), "Pss") <= rolled_up(os.getpid(), "Rss")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended before it was ready: .*holds no checkpoint"):
        measure_start(tmp_path, threads=1)
