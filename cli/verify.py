"""`tk verify`: checks every byte of a checkpoint."""

import time
from pathlib import Path

import click

from ..core.progress import format_bytes, format_count, format_seconds, progress_bar
from .common import PATH, print_json
from .invocation import note, say_error
from .reshard import open_checkpoint

EXIT_DAMAGED = 3


@click.command(epilog="Example: tk verify runs/demo/run")
@click.argument("path", metavar="CKPT", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def verify(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Read every byte of CKPT and compare it with the checksums taken when it was written.

    Exits with 3 if a byte is wrong, and names tensor, file and block; also if headers or index describe other tensors
    than the manifest, or another program put weights into the folder. Harmless files of others are named in notes.
    """
    checkpoint = open_checkpoint(path)
    total = sum(chunk.nbytes for chunks in checkpoint.chunks.values() for chunk in chunks)
    start = time.monotonic()
    with progress_bar("verify", total if checkpoint.folder.has_checksums else 0, show=format_bytes) as bar:
        report = checkpoint.verify(bar.advance)
    seconds = time.monotonic() - start
    if as_json:
        print_json(report.to_json() | {"seconds": seconds})
    else:
        for problem in report.problems:
            say_error(problem.message)
        for remark in report.notes:
            note(remark)
        num_files = format_count(report.num_files, "file")
        if not report.has_checksums:
            click.echo(
                f"{report.path}: correct headers and sizes in {num_files}; the checkpoint has no checksums, so their "
                "data was not checked"
            )
        elif report.ok:
            speed = report.num_bytes / 1e9 / max(seconds, 1e-6)
            click.echo(
                f"{report.path}: {format_bytes(report.num_bytes)} in {num_files}, all as written "
                f"({format_seconds(seconds)}, {speed:.2f} GB/s)"
            )
    if not report.ok:
        ctx.exit(EXIT_DAMAGED)
