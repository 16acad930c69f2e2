"""The set-up of process groups and links over gloo: seconds, and sockets, files and threads of a rank.

python benchmarks/bench_groups.py
"""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import click
import torch
import torch.distributed as dist

from tk.core.layout import Layout
from tk.parallel.mesh import Mesh

LAYOUTS = {
    "tp 4, pp 2, dp 4": Layout(tp=4, pp=2, dp=4, zero=2),
    "pp 4, dp 8": Layout(pp=4, dp=8, zero=1),
    "dp 32": Layout(dp=32, zero=3),
    "dp 32, shard_size 8": Layout(dp=32, zero=3, shard_size=8),
}


def measure(rank: int, name: str, store: str) -> None:
    """Builds one mesh on one rank; rank 0 prints the row of the table, with the most of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=LAYOUTS[name].world_size)
    dist.barrier()
    before, start = _held(), time.perf_counter()
    mesh = Mesh.build(LAYOUTS[name], num_kv_heads=4, tied=True)
    dist.barrier()
    seconds = time.perf_counter() - start
    most = torch.tensor([*before, *_held()])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if mesh.world.rank == 0:
        cells = (f"{own} + {more - own}" for own, more in zip(most[:3].tolist(), most[3:].tolist(), strict=True))
        print(f"| {name} | {seconds:.2f} | {' | '.join(cells)} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _held() -> tuple[int, int, int]:
    """Returns the numbers of sockets, of other open files, and of threads of this process."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    sockets = sum(file.startswith("socket:") for file in files)
    return sockets, len(files) - sockets, len(os.listdir("/proc/self/task"))


@click.command()
def main() -> None:
    """Print the seconds of `Mesh.build`, and what the rank with the most holds: of torch's default group + after it."""
    print("| 32 ranks | s | sockets | other files | threads |\n|---|---|---|---|---|", flush=True)
    forks = multiprocessing.get_context("fork")  # ranks that import torch one by one take minutes
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            places = range(layout.world_size)
            ranks = [forks.Process(target=measure, args=(place, name, f"{folder}/store")) for place in places]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            if any(rank.exitcode for rank in ranks):
                raise SystemExit("A rank failed; its error is above.")


if __name__ == "__main__":
    main()
