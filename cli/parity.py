"""`tk parity`: the comparison of training at many layouts with training in one process."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..core.progress import progress_bar
from .common import PATH, PATH_TEXT, print_json
from .invocation import say

if TYPE_CHECKING:
    from ..parity.judge import Result
    from ..parity.layout import ParityLayout
    from ..parity.matrix import Matrix
    from ..parity.report import ParityReport
    from ..parity.subject import Subject


@click.command(epilog="Example: tk parity --layouts default -o docs/parity.md")
@click.argument("config", required=False, type=PATH)
@click.option(
    "--layouts",
    default="default",
    show_default=True,
    metavar="FILE|default|all",
    type=PATH_TEXT,
    help="default: a selection in which any three axes' values meet (of some axes any two); all: every layout; FILE: "
    "a TOML or JSON list.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--steps", metavar="N", type=click.IntRange(1), default=10, show_default=True, help="Training steps of each layout."
)
@click.option(
    "--nproc", metavar="N", type=click.IntRange(1), default=8, show_default=True, help="Processes that run the layouts."
)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), help="Default: as in CONFIG, or fp32 without one.")
@click.option(
    "--resume",
    "results",
    type=PATH,
    metavar="FILE",
    help="Store results in FILE, and skip the layouts whose results it has.",
)
@click.option("-o", "--out", type=PATH, metavar="FILE", help="Write a report in Markdown.")
@click.option("--dry-run", is_flag=True, help="List the layouts, and stop.")
@click.pass_context
def parity(
    ctx: click.Context,
    config: Path | None,
    layouts: str,
    as_json: bool,
    steps: int,
    nproc: int,
    precision: str | None,
    results: Path | None,
    out: Path | None,
    dry_run: bool,
) -> None:
    """Train a small model (or CONFIG's) at many layouts, and compare loss, gradient norm, first gradients and updates
    with those of one process. Exits with 1 if a layout differs by more than rounding.
    """
    with tempfile.TemporaryDirectory(prefix="tk-parity-") as scratch:
        subject = _subject(config, Path(scratch), steps, precision)
        chosen, words = _choose(layouts, subject, nproc, dry_run)
        if dry_run:
            for layout in chosen:
                click.echo(str(layout))
            click.echo(words)
            return
        if words:
            say(words)
        report = _compare(subject, list(chosen), words, Path(scratch), nproc, results)
    if as_json:
        print_json({"layouts": [result.to_json() for result in report.ordered]})
    else:
        _show(report)
    if out is not None:
        commit = checkout_commit(Path(__file__).parents[1])
        out.write_text(report.page(_command_line(ctx), commit), encoding="utf-8")
    ctx.exit(1 if report.failed else 0)


def _command_line(ctx: click.Context) -> list[str]:
    """Returns the words of the command line that started this command."""
    words = ["tk", "parity"]
    for param in ctx.command.params:
        name = str(param.name)
        value = ctx.params.get(name)
        if value is None or ctx.get_parameter_source(name) != ParameterSource.COMMANDLINE:
            continue
        words += [] if isinstance(param, click.Argument) else [param.opts[0]]
        words += [] if value is True else [str(value)]
    return words


def checkout_commit(root: Path) -> str:
    """Returns the commit of the checkout `root`, with a note if files differ from it; "" if it is no checkout."""
    if not (root / ".git").exists():  # an installed tk, perhaps inside the checkout of another project
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty= with local changes", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _subject(config: Path | None, scratch: Path, steps: int, precision: str | None) -> "Subject":
    from ..core.config import load_toml
    from ..parity.subject import Subject
    from ..train.config.train_config import TrainConfig

    if config is None:
        return Subject.built_in(scratch, steps, precision or "fp32")
    return Subject.of(load_toml(config, TrainConfig), steps, precision)


def _choose(layouts: str, subject: "Subject", nproc: int, complete: bool) -> tuple[Iterable["ParityLayout"], str]:
    """Returns the layouts to compare, and a sentence on the matrix that they are from.

    If `complete`, the sentence is followed by every reason for which combinations were left out.
    """
    from ..parity.layouts_file import read_layouts
    from ..parity.matrix import matrix

    if layouts not in ("default", "all"):
        return read_layouts(Path(layouts), subject, nproc), ""
    everything = matrix(subject, nproc)
    if layouts == "all":
        return everything.layouts(), _describe(everything, everything.num_layouts, complete)
    chosen = everything.covering()
    return chosen, _describe(everything, len(chosen), complete)


def _describe(matrix: "Matrix", num_chosen: int, complete: bool) -> str:
    words = f"{matrix.num_layouts} of {matrix.num_combinations} combinations are valid, distinct layouts"
    if num_chosen < matrix.num_layouts:
        words += f"; {num_chosen} of them, in which any three axes' values meet (of some axes any two), are compared"
    reasons = matrix.left_out().most_common() if complete else []
    return f"{words}." + "".join(f"\n  left out {count}: {reason.rstrip('.')}." for reason, count in reasons)


def _compare(
    subject: "Subject", layouts: Sequence["ParityLayout"], words: str, scratch: Path, nproc: int, path: Path | None
) -> "ParityReport":
    from ..parity.judge import bounds_for
    from ..parity.report import ParityReport
    from ..parity.results_file import ResultsFile
    from ..parity.run import ParityRun

    subject.prepare(scratch)
    with ExitStack() as stack:
        kept = stack.enter_context(ResultsFile(path, subject.settings())) if path else None
        done = kept.done if kept else {}
        found: dict[ParityLayout, Result] = {layout: done[layout] for layout in layouts if layout in done}
        bar = stack.enter_context(progress_bar("parity", len(layouts), done=len(found)))
        missing = [layout for layout in layouts if layout not in found]
        for result in ParityRun(subject, scratch, nproc).run(missing):
            found[result.layout] = result
            if kept:
                kept.add(result)
            bar.advance(1, f"{result.layout}" + (" failed" if result.error else ""))
    precision, steps = subject.base.precision.params, subject.base.train.steps
    bounds = bounds_for(precision, subject.base.optimizer)
    return ParityReport(list(found.values()), bounds, steps, precision, subject.describe(), words)


def _show(report: "ParityReport") -> None:
    from ..parity.report import COLUMNS, ROWS_SHOWN

    head, rows = COLUMNS, report.rows(ROWS_SHOWN)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        for row in [head, *rows]:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(rows) < len(report.results):
        click.echo(f"... and {len(report.results) - len(rows)} layouts that differ less; --json prints all")
    for line in report.remarks():
        click.echo(line)
    click.echo(report.verdict)
