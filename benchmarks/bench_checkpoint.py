"""Reshard, load and verify against `cp -r`, PyTorch DCP, safetensors, DeepSpeed and dd, on the same bytes in one run.

In cold rounds the source is evicted from the page cache before each run. Written files are fsynced before the clock
stops. Every round runs each contender once, so that a busy machine slows all alike; medians are over rounds.
DeepSpeed, in an environment of its own (peers/environments.py), makes a ZeRO-3 checkpoint of as many bytes and
converts it into its universal format.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np

from tk.benchmarks.peers.environments import peer_environment, python_if_possible
from tk.checkpoint import NewStep, RunFolder, commit, write_part
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import Table, with_slots
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table

PEERS = Path(__file__).with_name("checkpoint_peers.py")
DEEPSPEED = Path(__file__).with_name("peers") / "deepspeed_checkpoint.py"
CP = "cp -r, fsync"
SLOTS = {"weight": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
LAYER_BYTES, END_BYTES = 141_582_336, 393_216_000  # of the model below


def model(num_bytes: int) -> Table:
    """Returns the tensors of a Llama whose weights and Adam states in fp32 take about `num_bytes`."""
    layers = max(round((num_bytes - END_BYTES) / LAYER_BYTES), 1)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024,
        "intermediate_size": 2816, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return with_slots(tensor_table(ModelConfig.from_json(config)), SLOTS)


def make_source(run: Path, table: Table, layout: Layout) -> Path:
    """Saves a step with random values and returns its folder."""
    rng = np.random.default_rng(0)
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(1)
        for rank in range(layout.world_size):
            items = owned(table, layout, rank)
            entries = [(i, "F32", lambda i=i: rng.random(i.box.size, dtype=np.float32)) for i in items]
            write_part(folder, rank, table, entries)
        return commit(locked, NewStep(1, table, layout))


@dataclass
class CheckpointContender:
    """One command to time.

    Attributes:
        name: the name in the table.
        command: the command.
        source: the folder that it reads.
        target: the folder that it writes; None if it writes none.
        seconds: the time of each run, by whether the page cache was warm.
        cost: the costs that the last run printed: peak memory, bytes read and bytes written.
    """

    name: str
    command: list[str]
    source: Path
    target: Path | None = None
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    cost: dict[str, float] = field(default_factory=dict)

    def run(self, warm: bool) -> None:
        """Times one run from a cold or a warm page cache, including the fsync of its target."""
        if self.target:
            shutil.rmtree(self.target, ignore_errors=True)
        (_read_all if warm else evict)(self.source)
        start = time.perf_counter()
        done = subprocess.run(
            self.command, check=True, capture_output=True, text=True, env=peer_environment() | os.environ
        )
        if self.target:
            for path in (self.target, *self.target.rglob("*")):
                _fsync(path)
        self.seconds[warm].append(time.perf_counter() - start)
        last = done.stdout.strip().splitlines()[-1:]
        if last and last[0].startswith("{"):
            self.cost = json.loads(last[0])
        if self.target:
            shutil.rmtree(self.target)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def evict(folder: Path) -> None:
    """Drops the content of all files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            _fsync(path)
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _read_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**24):
                    pass


def peer(*words: str | Path) -> list[str]:
    """Returns the command line of a function of checkpoint_peers.py."""
    return [sys.executable, str(PEERS), *map(str, words)]


def contenders(folder: Path, tp4: Path, tp1: Path, deepspeed: Path | None) -> list[CheckpointContender]:
    """Returns all contenders."""
    new = folder / "new"

    def reshard(source: Path, tp: int) -> list[str]:
        return peer("tk_command", "reshard", source, new, "--tp", str(tp))

    dd = f"for f in {tp4}/*.safetensors; do dd if=$f of=/dev/null bs=16M status=none; done"
    shards, dcp, universal = folder / "shards", folder / "dcp", folder / "deepspeed"
    found = [
        CheckpointContender(CP, ["cp", "-r", str(tp4), str(new)], tp4, new),
        CheckpointContender("tk reshard tp 4 -> 1", reshard(tp4, 1), tp4, new),
        CheckpointContender("tk reshard tp 1 -> 4", reshard(tp1, 4), tp1, new),
        CheckpointContender("tk reshard tp 4 -> 2", reshard(tp4, 2), tp4, new),
        CheckpointContender("DCP consolidate 4 -> 1", peer("dcp_consolidate", shards, new), shards, new),
        CheckpointContender("tk load tp 4 -> 1", peer("tk_load", tp4, "1", "0"), tp4),
        CheckpointContender("DCP load 4 -> 1", peer("dcp_load", dcp), dcp),
        CheckpointContender("tk load tp 1 -> rank 1 of 4", peer("tk_load", tp1, "4", "1"), tp1),
        CheckpointContender("tk load tp 1 -> all 4 ranks", peer("tk_load_together", tp1, "4"), tp1),
        CheckpointContender("get_slice tp 1 -> rank 1 of 4", peer("safetensors_slices", tp1, "4", "1"), tp1),
        CheckpointContender("tk verify", peer("tk_command", "verify", tp4), tp4),
        CheckpointContender("dd bs=16M", ["bash", "-c", dd], tp4),
    ]
    if deepspeed:
        command = [str(deepspeed), str(DEEPSPEED), "convert", str(universal), str(new)]
        found.insert(5, CheckpointContender("DeepSpeed ds_to_universal", command, universal, new))
    return found


def make_sources(
    chosen: list[CheckpointContender], folder: Path, tp4: Path, num_bytes: int, deepspeed: Path | None
) -> None:
    """Makes the sources of the chosen contenders, other than the checkpoints at tp 4 and tp 1."""
    makers = {
        "shards": peer("make_consolidation_source", tp4, folder / "shards"),
        "dcp": peer("make_dcp_source", tp4, folder / "dcp"),
        "deepspeed": [str(deepspeed), str(DEEPSPEED), "make", str(folder / "deepspeed"), str(num_bytes), "2"],
    }
    for name, command in makers.items():
        if any(one.source == folder / name for one in chosen):
            log(f"making {name}")
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=peer_environment() | os.environ)


def rows(chosen: list[CheckpointContender], num_bytes: int) -> list[str]:
    """Returns the rows of the table for one size: medians, and the time of cp as a multiple of each."""
    gigabytes, lines = num_bytes / 1e9, []
    cp = [statistics.median(one.seconds[False]) for one in chosen if one.name == CP]
    for one in chosen:
        cold, warm = one.seconds[False], one.seconds[True]
        middle = statistics.median(cold)
        row = [f"{gigabytes:.2f}", one.name, f"{middle:.2f}", f"{min(cold):.2f}-{max(cold):.2f}"]
        row += [f"{gigabytes / middle:.2f}", f"{cp[0] / middle:.2f}" if cp else ""]
        row += [f"{statistics.median(warm):.2f}" if warm else ""]
        row += [f"{one.cost['peak_mib']:.0f}" if one.cost else ""]
        row += [f"{one.cost[key] / num_bytes:.3f}" if one.cost else "" for key in ("read", "written")]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def log(line: str) -> None:
    """Prints a line of progress to stderr, since stdout has the table."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def measure(
    gigabytes: float, rounds: int, warm_rounds: int, only: str, folder: Path, deepspeed: Path | None
) -> list[str]:
    """Times all contenders at one size, in turn, and returns the rows of the table."""
    with TemporaryDirectory(dir=folder) as name:
        work = Path(name).resolve()
        log(f"{gigabytes} GB: making tp 4 and tp 1")
        tp4 = make_source(work / "run", model(int(gigabytes * 1e9)), Layout(tp=4))
        num_bytes = sum(file.stat().st_size for file in tp4.rglob("*.safetensors"))
        tp1 = work / "tp1"
        subprocess.run(peer("tk_command", "reshard", tp4, tp1, "--tp", "1"), check=True, capture_output=True)
        words = only.split(",")
        chosen = [one for one in contenders(work, tp4, tp1, deepspeed) if any(word in one.name for word in words)]
        make_sources(chosen, work, tp4, num_bytes, deepspeed)
        for number in range(rounds + warm_rounds):
            for one in chosen:
                warm = number >= rounds
                one.run(warm)
                log(f"{'warm' if warm else f'cold {number + 1}'}: {one.name} {one.seconds[warm][-1]:.2f} s")
        return rows(chosen, num_bytes)


@click.command()
@click.option(
    "--gigabytes", default=[2.0, 6.0], multiple=True, show_default=True, help="Weights and Adam states, fp32."
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--warm-rounds", default=1, show_default=True)
@click.option("--only", default="", help="Words, separated by commas; a contender's name must contain one.")
@click.option("--deepspeed/--no-deepspeed", default=True, show_default=True, help="Include DeepSpeed.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".build"), show_default=True)
def main(gigabytes: tuple[float, ...], rounds: int, warm_rounds: int, only: str, deepspeed: bool, folder: Path) -> None:
    """Run every contender once per round at each size, and print a Markdown table of the medians."""
    deepspeed_python = python_if_possible("deepspeed") if deepspeed else None
    print(f"{os.cpu_count()} cores, {rounds} cold and {warm_rounds} warm rounds\n")
    print("| GB | | cold, s | range | GB/s | cp / it | warm, s | peak MiB | read / size | written / size |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for size in gigabytes:
        print("\n".join(measure(size, rounds, warm_rounds, only, folder, deepspeed_python)), flush=True)


if __name__ == "__main__":
    main()
