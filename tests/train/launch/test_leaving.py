"""A script that does not destroy its process group leaves no gloo thread at the interpreter's end."""

import os
import socket
import subprocess
import sys

import pytest

_SCRIPT = """
import atexit, os, sys
from pathlib import Path
import torch

def threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print("threads:", *sorted(name for name in names if "gloo" in name))

atexit.register(threads)  # runs last, since functions that are registered later run earlier
from tk.train import initialize

engine = initialize(torch.nn.Sequential(torch.nn.Linear(2, 2)), zero=int(sys.argv[1]))
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
threads()
if sys.argv[2] == "failing":
    raise ValueError("the script's own")
"""


@pytest.mark.parametrize(("zero", "how"), [pytest.param(3, "well", marks=pytest.mark.matrix), (0, "failing")])
def test_gloo_threads_end_before_the_interpreter(zero: int, how: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(zero), how], env=os.environ | torchrun, capture_output=True, text=True
    )
    during, after = result.stdout.splitlines()
    assert "gloo" in during
    if how == "well":
        assert after == "threads:"
        assert result.returncode == 0, result.stderr
    else:
        assert "the script's own" in result.stderr
        assert result.returncode == 1
