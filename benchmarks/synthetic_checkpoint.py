"""The metadata of a checkpoint of any size, with real parts and manifest, and sparse files for data.

The costs of opening, checking and planning depend on metadata alone, so the checkpoint of a model of 405 billion
parameters, saved by 4096 ranks, fits on a laptop. `python benchmarks/synthetic_checkpoint.py` makes it, then opens it
and plans one rank of another layout, in a process of its own.
"""

import hashlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from shutil import rmtree

import click

from tk.checkpoint import Checkpoint
from tk.checkpoint.format.chunk import BLOCK, Chunk, Part
from tk.checkpoint.format.manifest import Manifest, PartRecord, StoredTensor
from tk.checkpoint.format.region import Region
from tk.checkpoint.read.step_folder import StepFolder
from tk.checkpoint.save.writer import part_name, plan_files
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.core.ownership import owned
from tk.core.tensors import Table, with_slots
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table

SLOTS = {"weight": "BF16", "master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
LAYOUT_405B = Layout(tp=8, pp=16, dp=32, zero=1)


def llama_405b(num_layers: int = 126) -> Table:
    """Returns the tensors of Llama 3.1 405B."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384,
        "intermediate_size": 53248, "num_hidden_layers": num_layers, "num_attention_heads": 128,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    return with_slots(tensor_table(ModelConfig.from_json(config)), SLOTS)


def make_step(folder: Path, table: Table, layout: Layout) -> int:
    """Writes a step folder as a save at `layout` would, with sparse data files; returns the number of chunks."""
    (folder / "parts").mkdir(parents=True)
    shapes = {spec.name: spec.shape for spec in table}
    records, num_chunks = {}, 0
    for rank in range(layout.world_size):
        entries = [(item, SLOTS[item.slot]) for item in owned(table, layout, rank)]
        files = plan_files(rank, entries, shapes)
        chunks = []
        for file in files:
            with (folder / file.name).open("wb") as hole:
                hole.write(file.header)
                hole.truncate(file.size)
            for entry in file.entries:
                item, nbytes = entry.owned, entry.end - entry.begin
                crc = (hash((rank, entry.begin)) % 2**32,) * -(-nbytes // BLOCK)
                chunks.append(Chunk(item.tensor, item.slot, item.box, item.flat, file.name, entry.begin, nbytes, crc))
        part = Part(rank, {file.name: file.digest for file in files}, tuple(chunks))
        data = part.to_bytes()
        (folder / "parts" / part_name(rank)).write_bytes(data)
        records[part_name(rank)] = PartRecord.of(data, part, shapes)
        num_chunks += len(chunks)
    tensors = {spec.name: StoredTensor.of(spec) for spec in table}
    data = Manifest(1, layout, tensors, parts=records).to_bytes()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMIT").write_text(f"{hashlib.sha256(data).hexdigest()}\n")
    return num_chunks


def plan_rank(checkpoint: Checkpoint, table: Table, layout: Layout, rank: int) -> int:
    """Finds the stored chunks that a rank of another layout loads, and returns their number.

    They are those of its weights and of its share of every optimizer state.
    """
    pieces = [piece for param in local_params(table, layout, rank) for piece in param.pieces]
    wanted = [(piece.tensor.name, "weight", Region.of(piece.box)) for piece in pieces]
    states = [item for item in owned(table, layout, rank) if item.slot != "weight"]
    wanted += [(item.tensor, item.slot, Region.of(item.box, item.flat)) for item in states]
    return sum(1 for name, slot, region in wanted for _ in checkpoint.chunks[name, slot].find(region))


def measure(folder: Path, table: Table, target: Layout) -> None:
    """Opens the checkpoint, plans one rank and checks coverage; prints seconds and peak memory after each."""
    start = time.perf_counter()

    def report(what: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        wall = time.perf_counter() - start
        print(f"  {what:<56} {wall:>6.2f} s, {time.process_time():>5.2f} s CPU, {peak:>4.0f} MiB", flush=True)

    step = StepFolder.open(folder)
    checkpoint = Checkpoint(step)
    report("open (COMMIT, manifest)")
    name = table[1].name
    checkpoint.chunks[name, "weight"]
    report(f"find {name}: {len(step.parts.opened)} of {len(step.parts)} parts opened")
    found = plan_rank(checkpoint, table, target, target.world_size // 2 + 1)
    report(f"plan a rank of tp {target.tp}, pp {target.pp}, dp {target.dp}: {found} chunks")
    checkpoint.check()
    report("sizes and coverage of every tensor and slot")


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".build/bench/llama-405b"), show_default=True)
@click.option("--measure-only", is_flag=True, hidden=True)
def main(folder: Path, measure_only: bool) -> None:
    """Open 405 billion parameters, saved by 4096 ranks (tp 8, pp 16, dp 32, ZeRO 1); plan for tp 4, pp 8, dp 16."""
    table = llama_405b()
    if measure_only:
        measure(folder, table, Layout(tp=4, pp=8, dp=16, zero=1))
        return
    rmtree(folder, ignore_errors=True)
    num_chunks = make_step(folder, table, LAYOUT_405B)
    size = sum(path.stat().st_size for path in (folder / "parts").iterdir())
    print(f"{LAYOUT_405B.world_size} parts, {size / 2**20:.0f} MiB, {num_chunks} chunks", flush=True)
    try:
        subprocess.run([sys.executable, __file__, "--folder", os.fspath(folder), "--measure-only"], check=True)
    finally:
        rmtree(folder)


if __name__ == "__main__":
    main()
