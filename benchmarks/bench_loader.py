"""The time of a training step whose rows come from a slow disk, beside the slower one of reading and computing."""

import time
from statistics import median

import click
import numpy as np

from tk.train.run.read_ahead import ReadAhead

ROWS = 2  # per step
SIDE = 256  # of the matrices that a step multiplies


def step_seconds(row_seconds: float, compute_seconds: float, steps: int) -> float:
    """Returns the median time of a step that takes its rows and computes; the first one, which waits, is left out."""
    matrix = np.ones((SIDE, SIDE), np.float32)

    def read(first: int) -> range:
        time.sleep(ROWS * row_seconds)
        return range(first, first + ROWS)

    found, batches = [], ReadAhead(read, stride=ROWS)
    with batches.running(steps + 1):
        for step in range(steps + 1):
            begin = time.perf_counter()
            batches.take(ROWS * step)
            end = time.perf_counter() + compute_seconds
            while time.perf_counter() < end:
                np.matmul(matrix, matrix)
            found.append(time.perf_counter() - begin)
    return median(found[1:])


@click.command()
@click.option("--row-ms", default=50.0, show_default=True, help="The time of a row on the disk.")
@click.option("--steps", default=20, show_default=True)
def main(row_ms: float, steps: int) -> None:
    """Print a step's time beside the slower one of reading its rows and computing, where each of them is the slower."""
    reading = ROWS * row_ms / 1e3
    for share in (0.5, 1.0, 2.0):
        seconds = step_seconds(row_ms / 1e3, share * reading, steps)
        slower = max(reading, share * reading)
        click.echo(
            f"reading {reading * 1e3:.0f} ms, computing {share * reading * 1e3:.0f} ms: a step takes "
            f"{seconds * 1e3:.1f} ms, {seconds / slower:.3f} of the slower one"
        )


if __name__ == "__main__":
    main()
