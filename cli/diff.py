"""`tk diff`: the comparison of two checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ..core.progress import format_bytes, progress_bar
from .common import PATH, print_json
from .reshard import open_checkpoint

if TYPE_CHECKING:
    from ..checkpoint.convert.diff import Comparison

MAX_LINES: Final = 50


@click.command(epilog="Example: tk diff runs/demo/run runs/demo/tp1\n\nExit codes as of diff(1): 0 equal, 1 different.")
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="B", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def diff(ctx: click.Context, a: Path, b: Path, as_json: bool) -> None:
    """Compare the tensors of two checkpoints bit by bit, also across layouts.

    If the dtypes of a tensor differ, both sides are cast to fp32. Memory use does not grow with the model, and every
    byte is checked against its checksum.
    """
    from ..checkpoint.convert.diff import compare, compared_bytes

    one, two = open_checkpoint(a), open_checkpoint(b)
    with progress_bar("diff", compared_bytes(one, two), show=format_bytes) as bar:
        found = compare(one, two, bar.advance)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    ctx.exit(0 if found.same else 1)


def _show(found: "Comparison") -> None:
    lines = [f"only in {found.a}: {name}" for name in found.only_in_a]
    lines += [f"only in {found.b}: {name}" for name in found.only_in_b]
    lines += [f"{one.tensor}, slot {one.slot}: {one.message}" for one in found.differences]
    for line in lines[:MAX_LINES]:
        click.echo(line)
    if len(lines) > MAX_LINES:
        click.echo(f"... and {len(lines) - MAX_LINES} more; --json prints all")
    verdict = "the same" if found.same else f"{len(lines)} differences"
    click.echo(f"{verdict}: {found.num_equal} slots of tensors are bit-equal")
