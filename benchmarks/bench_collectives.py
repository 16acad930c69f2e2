"""Collectives between CPU ranks of one host, over tk's links and over gloo: microseconds per call, taken in turn.

python benchmarks/bench_collectives.py
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import click
import torch
import torch.distributed as dist

from tk.core.process import keep_freed_memory
from tk.parallel.collectives import all_reduce, start_all_gather_flat, start_reduce_scatter_flat
from tk.parallel.mesh import Group, join_world

ELEMENTS = (16, 1024, 16_384, 262_144, 4_194_304)  # fp32


def measure(rank: int, num_ranks: int, store: str, rounds: int) -> None:
    """Measures every collective on one rank; rank 0 prints the rows of the table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    linked = join_world()
    plain = Group(linked.process_group, linked.rank, linked.size)
    for count in ELEMENTS:
        for name in ("all-reduce", "all-gather", "reduce-scatter"):
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(_time(name, linked, count))
                theirs.append(_time(name, plain, count))
            if rank == 0:
                mine, gloo = statistics.median(ours), statistics.median(theirs)
                row = f"| {num_ranks} | {name} | {count * 4:,} | {mine:.0f} | {gloo:.0f} | {gloo / mine:.1f} |"
                print(row, flush=True)
    dist.destroy_process_group()


def _time(name: str, group: Group, count: int) -> float:
    """Returns the microseconds of one call."""
    part, whole = torch.zeros(count), torch.zeros(count * group.size)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: all_reduce(part, group),
        "all-gather": lambda: start_all_gather_flat(whole, part, group).wait(),
        "reduce-scatter": lambda: start_reduce_scatter_flat(part, whole, group).wait(),
    }
    call, repeat = calls[name], max(3, min(100, 2**20 // count))
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


@click.command()
@click.option("--ranks", default=(2, 4), multiple=True, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--rank", default=-1, hidden=True)
@click.option("--store", default="", hidden=True)
def main(ranks: tuple[int, ...], rounds: int, rank: int, store: str) -> None:
    """Print medians over rounds; bytes are those of one rank's part. All-reduces above 1 MiB use gloo either way."""
    if rank >= 0:
        measure(rank, ranks[0], store, rounds)
        return
    print("| ranks | | bytes | link, us | gloo, us | gloo / link |\n|---|---|---|---|---|---|", flush=True)
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, "--ranks", str(count), "--rounds", str(rounds)]
            words += ["--store", f"{folder}/store"]
            processes = [subprocess.Popen([*words, "--rank", str(number)]) for number in range(count)]
            if any(process.wait() for process in processes):
                raise SystemExit("A rank failed; its error is above.")


if __name__ == "__main__":
    main()
