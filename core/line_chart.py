"""Panels of curves as one SVG, drawn by hand: no plotting library for a few lines."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

Points = list[tuple[float, float]]

COLOURS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # of Okabe and Ito, distinct to all eyes
WIDTH, HEIGHT, MARGIN, HEAD = 520, 310, 84, 44  # of a panel, its margin, and the legend above all, in pixels
MAX_POINTS: Final = 1500  # of a curve; more would be finer than the screen
TICKS: Final = 5
DASHES: Final = ' stroke-dasharray="6 4"'


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve, the number of its colour, and whether it is dashed; a dashed one has circles at its points.

    Attributes:
        kind: what its style stands for, in the panel's own legend; curves of one kind are all dashed, or none is.
    """

    points: Points
    colour: int = 0
    dashed: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A title and the curves below it.

    Attributes:
        across, up: the labels of the axes, with their units.
    """

    title: str
    lines: Sequence[Curve]
    across: str = ""
    up: str = ""


def draw_panels(panels: Sequence[Panel], legend: Sequence[str]) -> str:
    """Returns the text of an SVG file with all panels, two beside each other; `legend` names the colours in order."""
    width, height = 2 * WIDTH, HEAD + (len(panels) + 1) // 2 * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(legend),
    ]
    for index, panel in enumerate(panels):
        x, y = index % 2 * WIDTH, HEAD + index // 2 * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = MARGIN
    for index, name in enumerate(names):
        yield f'<rect x="{x}" y="16" width="18" height="4" rx="2" fill="{COLOURS[index % len(COLOURS)]}"/>'
        yield f'<text x="{x + 24}" y="22">{escape(name)}</text>'
        x += 48 + 7 * len(name)


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for line in panel.lines for point in line.points]
    yield f'<text x="{MARGIN}" y="14" font-weight="bold">{escape(panel.title)}</text>'
    yield from _kinds(panel.lines)
    if not points:
        yield f'<text x="{MARGIN}" y="40" fill="#888">nothing recorded</text>'
        return
    xs, ys = _ticks([x for x, _ in points]), _ticks([y for _, y in points])
    left, right, top, bottom = MARGIN, WIDTH - 20, 24, HEIGHT - 50

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
    middle = 'text-anchor="middle" fill="#666"'
    yield f'<text x="{(left + right) // 2}" y="{bottom + 38}" {middle}>{escape(panel.across)}</text>'
    place = f'transform="translate(16 {(top + bottom) // 2}) rotate(-90)"'
    yield f"<text {place} {middle}>{escape(panel.up)}</text>"
    for line in panel.lines:
        shown = [at(x, y) for x, y in line.points[:: len(line.points) // MAX_POINTS + 1]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        dashes = DASHES if line.dashed else ""
        style = f'stroke="{COLOURS[line.colour % len(COLOURS)]}" stroke-width="1.6" stroke-linejoin="round"'
        yield f'<polyline points="{path}" fill="none" {style}{dashes}/>'
        if line.dashed or len(shown) == 1:
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="white" {style}/>' for x, y in shown)


def _kinds(lines: Sequence[Curve]) -> Iterator[str]:
    """Yields the legend of the styles, beside the panel's title, from the right."""
    x = WIDTH - 20
    for kind, dashed in reversed({line.kind: line.dashed for line in lines if line.kind}.items()):
        x -= 34 + 7 * len(kind)
        yield f'<path d="M{x} 10h24" stroke="#666" stroke-width="1.6"{DASHES if dashed else ""}/>'
        yield f'<text x="{x + 30}" y="14">{escape(kind)}</text>'
        x -= 14


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
