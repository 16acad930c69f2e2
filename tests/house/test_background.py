"""The suite started in the background of a script, whose processes inherit that SIGINT is ignored."""

import subprocess
import sys
from pathlib import Path

STARTED = """
import signal, subprocess, sys
import tk.tests.conftest
blocked = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
sys.exit(int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1)
"""


def test_processes_that_tests_start_can_be_interrupted(root: Path) -> None:
    script = f'trap "" INT; exec "{sys.executable}" -c "$1"'
    ended = subprocess.run(["sh", "-c", script, "sh", STARTED], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
