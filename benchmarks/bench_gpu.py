"""One GPU: its own limits, then tk beside transformers on a Llama of 1.1 B parameters, and attention in tiles.

Each contender is a process of its own (gpu_contender.py), so that one's failure or memory leaves the others alone.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

CONTENDERS = (
    "limits",
    "tiles",
    "train-tk",
    "train-tk-compile",
    "train-transformers",
    "train-transformers-compile",
    "save-tk",
    "decode-tk",
    "decode-transformers",
    "decode-vllm",
)


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(CONTENDERS), help="Contenders to run; default: all.")
@click.option("--timeout", default=150.0, help="Seconds after which a contender is stopped.")
def main(only: tuple[str, ...], timeout: float) -> None:
    """Runs the contenders in turn; each prints its own figures."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TK_BENCH_RUN": str(Path(folder, "run"))}
        for name in only or CONTENDERS:
            click.echo(f"== {name}")
            command = [sys.executable, "-m", "tk.benchmarks.gpu_contender", name]
            try:
                code = subprocess.run(command, env=environment, timeout=timeout).returncode
            except subprocess.TimeoutExpired:
                click.echo(f"{name}: stopped after {timeout:.0f} s")
            else:
                click.echo(f"{name}: exit code {code}" if code else "")


if __name__ == "__main__":
    main()
