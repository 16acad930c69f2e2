"""The curves of runs, from their metrics.jsonl, drawn as one SVG."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...core.errors import ConfigError
from ...core.line_chart import Curve, Panel, Points, draw_panels
from .run_files import METRICS

KINDS: Final = ("training", "held-out")  # of a panel's first and second curve; the second is dashed
PANELS: Final = (
    ("loss", ("loss", "eval_loss"), "loss (nats per token)"),
    ("learning rate", ("lr",), "learning rate (no unit)"),
    ("gradient norm", ("grad_norm",), "L2 norm before clipping (no unit)"),
    ("throughput", ("tokens_per_second",), "tokens per second"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run's curves by metric."""

    name: str
    curves: dict[str, Points]


def read_run(path: Path) -> Run:
    """Reads the metrics of a run folder (or a metrics.jsonl); a line that a crash cut short is left out.

    Raises:
        ConfigError: there are none.
    """
    file = path / METRICS if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}. Name the run folder of a `tk train`.") from error
    curves: dict[str, Points] = {}
    for line in lines:
        try:
            values = json.loads(line)
            step = float(values["step"])
        except (ValueError, KeyError, TypeError):
            continue
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault(name, []).append((step, float(value)))
    if not any(name in curves for _, names, _ in PANELS for name in names):
        raise ConfigError(f"{file} has no metrics yet: the first are written after step 1.")
    return Run(str(path), curves)


def draw(runs: Sequence[Run]) -> str:
    """Returns the text of an SVG file with all panels, each run in a colour of its own."""
    return draw_panels([_panel(title, names, up, runs) for title, names, up in PANELS], [run.name for run in runs])


def _panel(title: str, names: Sequence[str], up: str, runs: Sequence[Run]) -> Panel:
    lines = [
        Curve(points, colour, dashed=number > 0, kind=KINDS[number] if len(names) > 1 else "")
        for colour, run in enumerate(runs)
        for number, name in enumerate(names)
        if (points := run.curves.get(name))
    ]
    return Panel(title, lines, "training step", up)
