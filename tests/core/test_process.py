"""Processes that tk starts."""

import ctypes
import gc
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tk.core.process import PARENT_VARIABLE, lasting_imports, start_module

CHILD = """
import json, os, sys
from helper_beside import word
from tk.core.process import die_with_parent
die_with_parent()
print(json.dumps([word, os.getsid(0) == os.getpid(), os.environ["EXTRA"], os.read(int(sys.argv[1]), 10).decode()]))
"""
PARENT = """
import sys
from tk.core.process import start_module
print(start_module("waiting_child").pid, flush=True)
sys.stdin.readline()
"""
BUSY = """
import sys, threading
from tk.core.process import exit_within
threading.Thread(target=sys.stdin.read).start()
exit_within(float(sys.argv[1]), 7)
print("ready", flush=True)
"""
FULL = """
import os
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 4096): pass
except BlockingIOError:
    os.set_blocking(2, True)
"""
AREAS = """
import ctypes, os, sys, threading
from tk.core.process import share_one_memory_area
libc = ctypes.CDLL(None)
if sys.argv[1] == "shared":
    share_one_memory_area()
barrier = threading.Barrier(4)
def allocate():
    libc.malloc(10_000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
libc.malloc_info(0, libc.fdopen(1, b"w"))
libc.fflush(None)
"""
WAITING = """
import sys
from tk.core.process import die_with_parent
die_with_parent()
print("ready", flush=True)
while True: sys.stdin.read()
"""

BLOCKS = """
import ctypes, sys
from pathlib import Path
from tk.core.process import return_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "True":
    return_large_blocks()
libc.free(libc.malloc(20 * 2**20))  # by default glibc then takes blocks up to this size from its heap
before = resident()
large = []
for _ in range(16):
    large.append(libc.malloc(4 * 2**20))
    ctypes.memset(large[-1], 1, 4 * 2**20)
    libc.malloc(500_000)  # stays behind it
for block in large:
    libc.free(block)
print(resident() - before)
"""


def test_a_child_finds_the_modules_of_its_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "json.py").write_text("raise SystemExit('a module in the current folder is not imported')")
    (tmp_path / "modules" / "helper_beside.py").write_text("word = 'found'")
    (tmp_path / "modules" / "some_child.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", ["modules", *(path for path in sys.path if path)]
    )  # relative, as an uninstalled checkout's may be
    ours, theirs = os.pipe()
    os.write(theirs, b"inherited")
    os.close(theirs)
    child = start_module(
        "some_child", [str(ours)], environment={"EXTRA": "x"}, inherited=[ours], stdout=subprocess.PIPE
    )
    os.close(ours)
    output, _ = child.communicate(timeout=60)
    assert json.loads(output) == ["found", True, "x", "inherited"]


@pytest.mark.parametrize(("seconds", "code"), [("0.1", 7), ("60", 0)])
def test_a_process_ends_in_time_with_a_thread_that_does_not_and_earlier_if_it_can(seconds: str, code: int) -> None:
    piped = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", BUSY, seconds], stdin=piped, stdout=piped, stderr=piped)
    assert process.stdin is not None
    assert process.stderr is not None
    with process:
        if code == 0:
            process.stdin.close()  # ends the thread
        assert process.wait(30) == code
        said = process.stderr.read().decode()
    assert (said == "") is (code == 0)
    if code:
        assert re.fullmatch(
            r"tk has not ended by itself in 0\.1 s, and .* its threads: MainThread, Thread-1.*\.\n", said
        )


def test_a_process_ends_in_time_whose_stderr_nobody_reads() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FULL + BUSY, "0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.wait(30) == 7


def test_a_child_ends_with_its_starter(tmp_path: Path) -> None:
    (tmp_path / "waiting_child.py").write_text(WAITING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        process_id, ready = int(starter.stdout.readline()), starter.stdout.readline()
        assert ready == "ready\n"
        pidfd = os.pidfd_open(process_id)
        starter.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, starter.pid, os.WEXITED | os.WNOWAIT)
    with os.fdopen(pidfd) as gone:
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(gone, select.POLLIN)
        assert poll.poll(60_000)


def test_a_child_whose_starter_is_gone_already_ends_at_once() -> None:
    code = "from tk.core.process import die_with_parent; die_with_parent(); print('went on')"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        PARENT_VARIABLE: str(os.getppid()),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_no_search_for_garbage_looks_at_lasting_imports() -> None:
    class Imported:
        """An object that an import makes."""

    with lasting_imports():
        assert not gc.isenabled(), "nor while they are made"
        made = [Imported()]
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects())


def test_a_failed_import_leaves_the_search_for_garbage_on() -> None:
    with pytest.raises(ImportError), lasting_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_threads_can_share_one_memory_area(kind: str) -> None:
    found = subprocess.run([sys.executable, "-c", AREAS, kind], check=True, capture_output=True, text=True).stdout
    assert (found.count("<heap ") == 1) == (kind == "shared"), found


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
@pytest.mark.parametrize("given", [False, True])
def test_freed_blocks_of_a_mebibyte_need_not_stay_resident(given: bool) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS, str(given)], check=True, capture_output=True, text=True)
    assert (int(done.stdout) < 8 * 2**20) == given, f"{done.stdout} bytes of 64 MiB stayed resident"
