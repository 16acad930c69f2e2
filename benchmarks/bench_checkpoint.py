"""Speed of import, reshard, verify and export, against `cp -r` and sync of the same bytes."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tk.benchmarks.random_model import random_model


def timed(what: str, num_bytes: int, *command: str) -> None:
    """Run a command and print its time and throughput, flushing what it wrote to disk included."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    os.sync()
    took = time.perf_counter() - start
    print(f"{what:<24} {took:>7.2f} s {num_bytes / took / 2**20:>8.0f} MiB/s", flush=True)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Another Hugging Face folder or checkpoint.")
def main(model: Path | None) -> None:
    """Each step as its own `tk` process, as a user would run it."""
    source = model or random_model(Path(".build/bench/llama-135m"))
    num_bytes = sum(file.stat().st_size for file in source.rglob("*.safetensors"))
    tk = (sys.executable, "-m", "tk")
    with TemporaryDirectory(dir=".build") as name:
        folder = Path(name)
        timed("cp -r", num_bytes, "cp", "-r", str(source), f"{folder}/copy")
        shutil.rmtree(folder / "copy")
        timed("hugging face -> tp 4", num_bytes, *tk, "reshard", str(source), f"{folder}/tp4", "--tp", "4")
        timed("verify tp 4", num_bytes, *tk, "verify", f"{folder}/tp4")
        timed("tp 4 -> tp 1", num_bytes, *tk, "reshard", f"{folder}/tp4", f"{folder}/tp1", "--tp", "1")
        timed("export tp 4", num_bytes, *tk, "export", f"{folder}/tp4", f"{folder}/hf")


if __name__ == "__main__":
    main()
