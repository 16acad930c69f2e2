"""`tk plot`: a chart of loss, learning rate, gradient norm and throughput of runs."""

from pathlib import Path

import click

from .common import PATH


@click.command(epilog="Example: tk plot runs/demo/run runs/tiny -o runs.svg")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option("-o", "--out", metavar="FILE", type=PATH, help="FILE.svg or FILE.png; default: RUN/curves.svg.")
def plot(runs: tuple[Path, ...], out: Path | None) -> None:
    """Draw loss (on held-out text dashed), learning rate, gradient norm and tokens per second of run folders."""
    from ..train.config.extras import require_extra
    from ..train.records.curves import draw, read_run

    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "curves.svg"
    if target.suffix not in (".svg", ".png"):
        raise click.UsageError(f"-o {target}: the name of the file must end in .svg or .png.")
    if target.suffix == ".png":
        require_extra("resvg_py", "plot", f"{target}: a PNG", "FILE.svg needs nothing, and every browser shows it.")
    svg = draw([read_run(run) for run in runs])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(_png(svg) if target.suffix == ".png" else svg.encode())
    click.echo(target)


def _png(svg: str) -> bytes:
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg_string=svg, zoom=2))
