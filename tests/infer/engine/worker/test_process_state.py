"""What the kernel says about processes, of real ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tk.infer.engine.worker.process_state import ProcessState, describe_ranks

LOOP = "print('ready', flush=True)\nwhile True: pass"
WAIT = "import sys\nprint('ready', flush=True)\nsys.stdin.read()"
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


def test_a_process_computes_is_stopped_goes_on_and_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before, begun = ProcessState.of(process.pid), time.monotonic()
        while ProcessState.of(process.pid).cpu_seconds == before.cpu_seconds:
            assert time.monotonic() - begun < 60
        assert ProcessState.of(process.pid).has_computed(before, time.monotonic() - begun)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = ProcessState.of(process.pid)
        assert (stopped.words, stopped.hangs) == ("stopped", True)
        assert not ProcessState.of(process.pid).has_computed(stopped, 0.25)
        assert describe_ranks((process.pid,)) == f"rank 0 (process {process.pid}, stopped)"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (ProcessState.of(process.pid).words, ProcessState.of(process.pid).hangs) == ("ended", True)
    gone = ProcessState.of(process.pid)
    assert (gone.words, gone.hangs, gone.cpu_seconds) == ("in an unknown state", True, 0.0)


def test_a_process_that_waits_does_not_compute_and_does_not_hang_by_itself() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        begun = time.monotonic()
        while (state := ProcessState.of(process.pid)).letter != "S":
            assert time.monotonic() - begun < 60
        assert (state.words, state.hangs, state.has_computed(state, 0.25)) == ("sleeping", False, False)
        assert process.stdin is not None
        process.stdin.close()
