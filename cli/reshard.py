"""`tk reshard`: rewrites a checkpoint for another layout."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..core.dtypes import COMPUTE_NAMES
from ..core.file_names import some_names
from ..core.progress import format_bytes, format_count, format_seconds, progress_bar
from .common import PATH, print_json
from .invocation import commands_for, note, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checkpoint.convert.reshard import Prepared
    from ..checkpoint.read.reader import Checkpoint
    from ..core.layout import Layout
    from ..core.tensors import Table

MAX_NAMES: Final = 8  # names in a note


@click.command(epilog="Example: tk reshard runs/demo/run weights --tp 1 --weights-only")
@click.argument("source", metavar="SRC", type=PATH)
@click.argument("target", metavar="DST", type=PATH)
@click.option("--tp", metavar="N", type=click.IntRange(1), required=True, help="Tensor-parallel ranks of the target.")
@click.option(
    "--pp", metavar="N", type=click.IntRange(1), default=1, show_default=True, help="Pipeline ranks of the target."
)
@click.option("--dtype", type=click.Choice(COMPUTE_NAMES), help="Dtype of the weights; default: as stored.")
@click.option("--weights-only", is_flag=True, help="Leave out optimizer state and the state that a run resumes from.")
@click.option("--dry-run", is_flag=True, help="Print the files that would be written, and stop.")
@click.option("--force", is_flag=True, help="Replace a checkpoint at DST, once the new one is complete.")
@click.option("--link", is_flag=True, help="Hard-link unchanged files, and copy their checksums without a check.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def reshard(
    source: Path,
    target: Path,
    tp: int,
    pp: int,
    dtype: str | None,
    weights_only: bool,
    dry_run: bool,
    force: bool,
    link: bool,
    as_json: bool,
) -> None:
    """Rewrite SRC (a step folder, a run folder or a Hugging Face folder) as the step folder DST.

    Weights and optimizer state keep their bits unless --dtype changes the weights. Memory use does not grow with the
    model. DST appears complete or not at all.
    """
    from ..checkpoint import Options, prepare_reshard
    from ..core.dtypes import by_name
    from ..core.layout import Layout

    checkpoint = open_checkpoint(source)
    options = Options(Layout(tp=tp, pp=pp), by_name(dtype) if dtype else None, weights_only, force=force, link=link)
    table = None if checkpoint.folder.has_splits else _architecture_table(checkpoint, options.layout)
    prepared = prepare_reshard(checkpoint, target, options, table)
    run_or_show(prepared, "reshard", dry_run, as_json)


def open_checkpoint(path: Path) -> "Checkpoint":
    """Opens the checkpoint that a command line names."""
    from ..checkpoint import Checkpoint

    return Checkpoint.open(path)


def run_or_show(prepared: "Prepared", verb: str, dry_run: bool, as_json: bool) -> None:
    """Runs a prepared copy with a progress bar, or only shows its plan.

    Args:
        prepared: the copy.
        verb: the name of the progress bar.
        dry_run: whether to show the plan and write nothing.
        as_json: whether to print JSON.
    """
    plan = prepared.plan
    summary: dict[str, Any] = {
        "source": str(prepared.source.path),
        "target": str(prepared.target.path),
        "layout": prepared.options.layout.to_json(),
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "files": {file.name: file.size for files in plan.files for file in files},
        "linked": {link.file.name: link.file.size for link in prepared.links},
        "side_files": {file.name: file.size for file in prepared.side_files},
        "not_copied": list(prepared.left_behind),
    }
    name_left_behind(prepared.left_behind)
    if dry_run:
        _show_plan(summary, as_json)
        return
    start, done = time.monotonic(), 0
    with progress_bar(verb, plan.bytes_read, show=format_bytes) as bar:

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            bar.advance(num_bytes, f"{done / 1e9 / max(time.monotonic() - start, 1e-6):.2f} GB/s")

        prepared.run(advance)
    summary["seconds"] = seconds = time.monotonic() - start
    summary |= prepared.change.facts() if prepared.change else {}
    if as_json:
        print_json(summary)
        return
    speed = plan.bytes_read / 1e9 / max(seconds, 1e-6)
    click.echo(
        f"{prepared.target.path}: {format_bytes(plan.bytes_written)} in {format_count(len(summary['files']), 'file')}, "
        f"{format_seconds(seconds)}, {speed:.2f} GB/s"
    )
    if prepared.change:
        click.echo(prepared.change.sentence())
    if prepared.links:
        click.echo(
            f"linked {format_count(len(prepared.links), 'file')}: checksums were copied without a check (tk verify "
            f"{prepared.target.path} checks them)"
        )
    suggest(*commands_for(prepared.target.path, prepared.target.path))


def name_left_behind(names: "Sequence[str]") -> None:
    """Prints a note about the names in the source's folder that a copy does not take along."""
    if names:
        note(f"not copied: {some_names(names, MAX_NAMES)}")


def _show_plan(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    click.echo(f"would read  {format_bytes(summary['bytes_read'])} from {summary['source']}")
    click.echo(f"would write {format_bytes(summary['bytes_written'])} to {summary['target']}:")
    for name, size in summary["files"].items():
        click.echo(f"  {name}  {format_bytes(size)}")
    for name, size in summary["linked"].items():
        click.echo(f"  {name}  {format_bytes(size)}, linked")


def _architecture_table(checkpoint: "Checkpoint", layout: "Layout") -> "Table | None":
    """Returns how a Hugging Face folder's tensors may be sharded.

    It is None for an adapter, and for a model that tk does not know, if the target has one rank and nothing has to be
    sharded.
    """
    from ..model.registry import architectures, tensor_table
    from ..model.stored_config import stored_config

    if checkpoint.manifest.adapter or (
        layout.world_size == 1 and checkpoint.config().get("model_type") not in architectures()
    ):
        return None
    return tensor_table(stored_config(checkpoint))
