"""The curves of runs, from their metrics.jsonl, drawn as one SVG by hand: no plotting library for four panels."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from ...core.errors import ConfigError
from .run_files import METRICS

Points = list[tuple[float, float]]  # (step, value)

PANELS: Final = (
    ("loss", ("loss", "eval_loss")),
    ("learning rate", ("lr",)),
    ("gradient norm", ("grad_norm",)),
    ("tokens per second", ("tokens_per_second",)),
)  # a panel's second curve is dashed
COLOURS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # of Okabe and Ito, distinct to all eyes
WIDTH, HEIGHT, MARGIN, HEAD = 520, 300, 64, 44  # of a panel, its margin, and the legend above all, in pixels
MAX_POINTS = 1500  # of a curve; more would be finer than the screen
TICKS = 5


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
    if not any(name in curves for _, names in PANELS for name in names):
        raise ConfigError(f"{file} has no metrics yet: the first are written after step 1.")
    return Run(str(path), curves)


def draw(runs: Sequence[Run]) -> str:
    """Returns the text of an SVG file with all panels, each run in a colour of its own."""
    width, height = 2 * WIDTH, HEAD + 2 * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(runs),
    ]
    for index, (title, names) in enumerate(PANELS):
        x, y = index % 2 * WIDTH, HEAD + index // 2 * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(title, names, runs), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _legend(runs: Sequence[Run]) -> Iterator[str]:
    x = MARGIN
    for index, run in enumerate(runs):
        colour = COLOURS[index % len(COLOURS)]
        yield f'<rect x="{x}" y="16" width="18" height="4" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 24}" y="22">{escape(run.name)}</text>'
        x += 48 + 7 * len(run.name)


def _panel(title: str, names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    points = [point for run in runs for name in names for point in run.curves.get(name, [])]
    yield f'<text x="{MARGIN}" y="14" font-weight="bold">{title}</text>'
    if not points:
        yield f'<text x="{MARGIN}" y="40" fill="#888">nothing recorded</text>'
        return
    xs, ys = _ticks([x for x, _ in points]), _ticks([y for _, y in points])
    left, right, top, bottom = MARGIN, WIDTH - 20, 24, HEIGHT - 36

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - xs[0]) / (xs[-1] - xs[0]), (y - ys[0]) / (ys[-1] - ys[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    for y in ys:
        height = at(xs[0], y)[1]
        yield f'<path d="M{left} {height:.1f}H{right}" stroke="#e4e4e4"/>'
        yield f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{y:,.6g}</text>'
    for x in xs:
        yield f'<text x="{at(x, ys[0])[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{x:,.6g}</text>'
    yield f'<path d="M{left} {bottom}H{right}" stroke="#888"/>'
    for index, run in enumerate(runs):
        for number, name in enumerate(names):
            curve = run.curves.get(name, [])
            line = [at(x, y) for x, y in curve[:: len(curve) // MAX_POINTS + 1]]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
            dashes = ' stroke-dasharray="6 4"' if number else ""
            style = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.6" stroke-linejoin="round"'
            yield f'<polyline points="{path}" fill="none" {style}{dashes}/>'
            if number or len(line) == 1:
                yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="white" {style}/>' for x, y in line)


def _ticks(values: Sequence[float]) -> list[float]:
    """Returns round numbers from below the smallest to above the largest value."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.floor(low / unit)
    return [unit * number for number in range(first, math.ceil(high / unit) + 1)]
