"""The report of a comparison: a table of layouts, worst first, a table of axes, and a page in Markdown."""

import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from .. import __version__
from ..core.progress import format_seconds
from .axes import AXES
from .judge import COMPARED_UPDATES, Bounds, Result, worst_first

COLUMNS: Final = ("layout", "loss", "grad norm", "gradients", "largest in", "updates", "seconds")
AXIS_COLUMNS: Final = ("axis", "value", "layouts", "failed", "loss", "grad norm", "gradients", "updates")
ROWS_SHOWN: Final = 20
ROWS_ON_PAGE: Final = 40
PAGE: Final = """\
# Parity: every layout against one process

This page is for people who ask whether a layout trains the same model as one process. It has the measured differences.

Written by `{command}`
on {date}; {machine}; {versions}. The same command writes this page again.{commit}

A small model trains {steps} steps in {precision} on one process and again at each layout, with the same data and seed.
Shown are the largest relative differences: of the loss and of the gradient norm over all steps, and of the first step's
gradients over all parameters, |g - g0| / (|g0| + 0.01 |G|) with G all gradients together. Updates are compared after
{updates} steps: |w - w1| / |w1| over all trained tensors together. {bounds}
After the last step everything that several ranks hold was compared bit for bit.
{model}

{matrix}**{verdict}** {took}

## By axis

The worst value over all layouts that have it.

{axes}

## Layouts{shown}

{layouts}
"""


@dataclass(frozen=True)
class ParityReport:
    """The results of a comparison, and their presentation.

    Attributes:
        results: the results of all layouts.
        bounds: the largest differences allowed.
        steps: the number of steps of each run.
        precision: the dtype of parameters and computation.
        model: a sentence about the model.
        matrix: a sentence about the choice of layouts; "" if a file lists them.
    """

    results: Sequence[Result]
    bounds: Bounds
    steps: int
    precision: str
    model: str = ""
    matrix: str = ""

    @property
    def failed(self) -> list[Result]:
        """The results that exceed a bound or lack a number, worst first."""
        return [result for result in self.ordered if result.badness(self.bounds) > 1]

    @property
    def ordered(self) -> list[Result]:
        """The results, worst first."""
        return worst_first(self.results, self.bounds)

    @property
    def verdict(self) -> str:
        """A sentence with the number of layouts that agree or differ."""
        if self.failed:
            return f"{len(self.failed)} of {len(self.results)} layouts differ from one process."
        return f"{len(self.results)} of {len(self.results)} layouts give the model of one process."

    def rows(self, count: int) -> list[tuple[str, ...]]:
        """Returns table rows of the `count` worst layouts, and of every one that failed."""
        return [_row(result) for result in self.ordered[: max(count, len(self.failed))]]

    def axis_rows(self) -> list[tuple[str, ...]]:
        """Returns a row per value of each axis: the numbers of layouts and of failures, and the worst differences."""
        rows: list[tuple[str, ...]] = []
        for axis in AXES:
            by_value: dict[str, list[Result]] = {}
            for result in self.results:
                by_value.setdefault(str(getattr(result.layout, axis)), []).append(result)
            by_value.pop("None", None)  # the model as configured: no value of this axis
            rows += [(axis, value, *self._summary(by_value[value])) for value in sorted(by_value)]
        return rows

    def _summary(self, group: Sequence[Result]) -> tuple[str, ...]:
        failed = sum(result.badness(self.bounds) > 1 for result in group)
        numbers = [[v for r in group if (v := getattr(r, key)) is not None] for key in asdict(self.bounds)]
        return (str(len(group)), str(failed), *(_number(max(values, default=None)) for values in numbers))

    def remarks(self) -> list[str]:
        """Returns lines about layouts that failed, and about layouts of which fewer steps were compared."""
        remarks = [f"{result.layout}: {result.error}" for result in self.ordered if result.error]
        changed = [result.routing_changed for result in self.results if result.routing_changed and not result.error]
        if changed:
            remarks.append(
                f"{len(changed)} layouts sent a token to another expert than one process did, first in step "
                f"{min(changed)}; each is compared up to there."
            )
        return remarks

    def page(self, command: Sequence[str], commit: str = "") -> str:
        """Returns the Markdown page.

        Args:
            command: the command line that made the report.
            commit: the commit of the code that was compared; "" if it is unknown.
        """
        rows = self.rows(ROWS_ON_PAGE)
        seconds = sum(result.seconds for result in self.results)
        remarks = "".join(f"\n- {line}" for line in self.remarks())
        return PAGE.format(
            command=shlex.join(command),
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            versions=f"Python {platform.python_version()}, torch {version('torch')}, tk {__version__}",
            commit=f"\n\nThe figures hold for commit {commit}." if commit else "",
            steps=self.steps,
            updates=min(self.steps, COMPARED_UPDATES),
            precision=self.precision,
            bounds=_bounds_in_words(self.bounds),
            model=self.model,
            matrix=self.matrix + "\n\n" if self.matrix else "",
            verdict=self.verdict,
            took=f"{format_seconds(seconds)} in all, counted layout by layout.",
            axes=_markdown(AXIS_COLUMNS, self.axis_rows()),
            shown=f" (the worst {len(rows)} of {len(self.results)})" if len(rows) < len(self.results) else "",
            layouts=_markdown(COLUMNS, rows) + ("\n" + remarks if remarks else ""),
        )


def _row(result: Result) -> tuple[str, ...]:
    numbers = (_number(value) for value in (result.loss, result.grad_norm, result.gradients))
    last = "failed" if result.error else result.parameter
    return (str(result.layout), *numbers, last, _number(result.updates), f"{result.seconds:.1f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _bounds_in_words(bounds: Bounds) -> str:
    names = {"loss": "loss", "grad_norm": "gradient norm", "gradients": "gradients", "updates": "updates"}
    words = [f"{names[key]} {bound:g}" for key, bound in asdict(bounds).items() if bound is not None]
    return f"Bounds: {', '.join(words)}."


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
