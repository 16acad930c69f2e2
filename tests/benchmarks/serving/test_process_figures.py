"""The figures of processes: a descriptor and a thread count, and so does a child."""

import os
import subprocess
import sys
import threading
import time

from tk.benchmarks.serving.process_figures import HEADING, ProcessFigures


def test_descriptors_threads_and_children_count() -> None:
    before = ProcessFigures.of(os.getpid(), time.monotonic())
    over = threading.Event()
    threading.Thread(target=over.wait).start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        after = ProcessFigures.of(os.getpid(), time.monotonic())
    finally:
        over.set()
        child.communicate()
    assert (after.descriptors - before.descriptors, after.threads - before.threads) == (1, 1)
    assert (after.processes - before.processes, after.others > before.others) == (1, True)
    assert 0 < after.anonymous < after.rss
    assert after.row("end").count("|") == HEADING.splitlines()[0].count("|")
