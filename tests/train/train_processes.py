"""The progress of `tk train` in other processes: lines of metrics, waits for a step, child processes."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE = 120.0  # seconds


def metrics_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last one may be under way


def losses_of(run: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics_of(run) if "loss" in line]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: any(line["step"] >= step for line in metrics_of(run)), process)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children_of(process: subprocess.Popen[str]) -> list[str]:
    """The process ids of the children that a process has now; none where it has ended."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return path.read_text().split() if process.poll() is None else []
