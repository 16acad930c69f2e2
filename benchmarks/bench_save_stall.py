"""The time for which a background save stops training, against a memcpy of the same bytes, taken in turn.

With `--dp 2` and more, ranks are processes on this machine; each writes its share and compares its replicas. A thread
computes the checksums of replicas while the next step runs. `stall` is the time for which a rank waits: the copy, and
the comparison before its next update. `beside` is the time by which the checksums slow that step (and the writer, which
starts at once if there is one rank). `cpu` is the processor time of all of it: if every core has a busy rank, work in
the background slows training too.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import add, sub
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tk.parallel.mesh import Mesh
    from tk.train.saving.snapshot import Snapshot


@click.command()
@click.option("--megabytes", default=400, show_default=True, help="Size of the model's weights and Adam states.")
@click.option("--dp", default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--zero", default=1, show_default=True, help="ZeRO stage.")
@click.option(
    "--saves",
    default=6,
    show_default=True,
    help="Number of saves; the first, which makes the buffers, is shown separately.",
)
@click.option("--rank", default=-1, hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
def main(megabytes: int, dp: int, zero: int, saves: int, rank: int, folder: Path | None) -> None:
    """Print the slowest rank's medians over all saves but the first."""
    if folder is not None:
        print(json.dumps(measure(megabytes, dp, zero, saves, rank, folder)))
        return
    with tempfile.TemporaryDirectory(dir=".build") as name:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(Path(name).absolute())]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(dp)
        ]
        results = [json.loads(rank.communicate()[0]) for rank in ranks]
    worst = max(results, key=lambda result: result["stall"])
    print(f"dp {dp}, ZeRO {zero}: a rank writes {worst['bytes'] / 2**20:.0f} MiB")
    for what in ("memcpy", "work", "first", "copy", "compare", "stall", "beside"):
        print(f"{what:<8} {worst[what] * 1e3:>8.1f} ms {worst[what] / worst['memcpy']:>6.2f} x memcpy")
    print(f"{'cpu':<8} {worst['cpu'] * 1e3:>8.1f} ms {worst['cpu'] / worst['memcpy_cpu']:>6.2f} x memcpy's")


def measure(megabytes: int, dp: int, zero: int, saves: int, rank: int, folder: Path) -> dict[str, float]:
    """Returns one rank's figures in seconds; the wait for the end of a save does not count."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from tk.checkpoint.save.save_job import SaveJob
    from tk.core.layout import Layout
    from tk.parallel.mesh import Mesh
    from tk.train.saving.replica_check import ReplicaCheck
    from tk.train.saving.saver import Saver

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=dp)
    mesh = Mesh.build(Layout(dp=dp, zero=zero), 4)
    snapshot = build(megabytes, mesh)
    job = SaveJob(folder / "run", "0" * 8, rank, snapshot.table, mesh.layout, keep=1)
    replicas = ReplicaCheck(snapshot, mesh)
    saver = Saver(job, snapshot, replicas, lock_fd=-1, background=True)
    values = [snapshot.values(item) for item in job.items()]
    copies = [np.zeros_like(value) for value in values]
    left, right = torch.rand(2, 512, 512)
    products = sum(value.nbytes for value in values) // 2**22
    names = ("memcpy", "memcpy_cpu", "work", "work_cpu", "copy", "compare", "step", "step_cpu")
    times: dict[str, list[float]] = {name: [] for name in names}

    def work() -> None:
        """Stands for forward, backward and the exchange of gradients."""
        for _ in range(products):
            torch.mm(left, right)
        dist.barrier()

    for step in range(saves):
        dist.barrier()  # before each measurement, so that all ranks start it at the same time
        with clock(times["memcpy"], times["memcpy_cpu"]):
            for to, of in zip(copies, values, strict=True):
                np.copyto(to, of)
        dist.barrier()
        with clock(times["work"], times["work_cpu"]):
            work()
        dist.barrier()
        with clock(times["step"], times["step_cpu"]):
            with clock(times["copy"]):
                saver.save(step, {}, wait=False)
            work()
            with clock(times["compare"]):
                saver.flush_pending()
        assert saver._writer
        saver._writer.wait()
    saver.close(failed=False)
    dist.destroy_process_group()
    times["stall"] = list(map(add, times["copy"], times["compare"]))
    times["beside"] = list(map(sub, map(sub, times["step"], times["work"]), times["stall"]))
    times["cpu"] = list(map(sub, times["step_cpu"], times["work_cpu"]))
    first = times["stall"][0]
    return {name: median(some[1:]) for name, some in times.items()} | {
        "first": first,
        "bytes": sum(value.nbytes for value in values),
    }


def build(megabytes: int, mesh: "Mesh") -> "Snapshot":
    """Returns the state of an untrained fp32 Llama whose weights and Adam states take about that many megabytes."""
    import torch

    from tk.model.config import ModelConfig
    from tk.model.decoder import Decoder
    from tk.model.init import fill_initial
    from tk.model.registry import tensor_table
    from tk.parallel.layers import LayerContext
    from tk.train.config.sections import OptimizerSection
    from tk.train.config.tensor_slots import with_run_slots
    from tk.train.saving.snapshot import Snapshot
    from tk.train.zero.flat_buffers import FlatBuffers
    from tk.train.zero.sharded_adamw import ShardedAdamW
    from tk.train.zero.states.open_states import StatePlaces

    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "vocab_size": 4096}
    num_layers = max(1, round((megabytes * 2**20 / 12 - 2 * 4096 * 1024) / (4 * 1024**2 + 3 * 1024 * 2816)))
    config = ModelConfig.model_validate(shape | {"num_hidden_layers": num_layers})
    table = with_run_slots(tensor_table(config), "fp32", OptimizerSection())
    decoder = Decoder(config, LayerContext(mesh.tp, torch.float32, torch.device("meta")))
    buffers = FlatBuffers(
        (decoder,),
        table,
        mesh,
        dtype=torch.float32,
        places=StatePlaces(torch.device("cpu")),
        fill=lambda local, parameter: fill_initial(local, parameter, 0, config.initializer_range),
    )
    optimizer = ShardedAdamW(buffers, OptimizerSection())
    for slot in table[0].states:
        for _, values in optimizer.runs(slot):
            values.fill_(0.5)  # a page that was never written would be the kernel's page of zeros, read from cache
    return Snapshot(optimizer)


@contextmanager
def clock(seconds: list[float], cpu_seconds: list[float] | None = None) -> Iterator[None]:
    """Appends the wall-clock time of the block, and the processor time of the process in it."""
    start, cpu_start = time.perf_counter(), time.process_time()
    yield
    seconds.append(time.perf_counter() - start)
    if cpu_seconds is not None:
        cpu_seconds.append(time.process_time() - cpu_start)


if __name__ == "__main__":
    main()
