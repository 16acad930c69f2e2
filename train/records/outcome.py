"""The outcome of a run, from its folder: the newest step, and the last losses in its metrics.jsonl (no torch)."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.read.reader import Checkpoint
from ...core.errors import TkError
from .run_files import METRICS


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run so far.

    Attributes:
        checkpoint: the newest good step; None if there is none.
        last_step: the line of the last logged step; empty if there is none.
        last_evaluation: the line of the last evaluation; empty if there is none.
    """

    checkpoint: Checkpoint | None
    last_step: Mapping[str, Any]
    last_evaluation: Mapping[str, Any]


def read_outcome(folder: Path) -> RunOutcome:
    """Reads a run folder; it raises nothing, since the run has ended well or has said why not."""
    checkpoint = None
    with suppress(TkError, OSError):
        checkpoint = Checkpoint.open(folder)
    steps: Mapping[str, Any] = {}
    evaluations: Mapping[str, Any] = {}
    for line in _lines(folder / METRICS):
        if "eval_loss" in line:
            evaluations = line
        elif "loss" in line:
            steps = line
    return RunOutcome(checkpoint, steps, evaluations)


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line
