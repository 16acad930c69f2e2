"""The memory of training ranks on a CPU beside that of `tk plan`, for layouts, precisions and recomputation.

Measured is by how much a rank's resident memory rises at most, once it has trained a tiny model in the same layout:
what Python, torch and communication take without a model is not in a plan.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import click

from tk.core.config import parse
from tk.core.cpu import read_cpu
from tk.core.progress import format_bytes
from tk.train.config.train_config import TrainConfig
from tk.train.planning.plan import make_plan

Sections = Mapping[str, Mapping[str, Any]]
LLAMA: Final = MappingProxyType(
    {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
)
TINY: Final = MappingProxyType({"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2})
BF16: Final = MappingProxyType({"params": "bf16"})
CONFIGURATIONS: Final[Mapping[str, Sections]] = MappingProxyType(
    {
        "fp32": {},
        "fp32, selective": {"recompute": {"mode": "selective"}},
        "fp32, full": {"recompute": {"mode": "full"}},
        "bf16": {"precision": BF16},
        "bf16, selective": {"precision": BF16, "recompute": {"mode": "selective"}},
        "bf16, full": {"precision": BF16, "recompute": {"mode": "full"}},
        "tp 2": {"parallel": {"tp": 2}},
        "tp 2, bf16, full": {"parallel": {"tp": 2}, "precision": BF16, "recompute": {"mode": "full"}},
        "pp 2": {"parallel": {"pp": 2}},
        "pp 2, full": {"parallel": {"pp": 2}, "recompute": {"mode": "full"}},
        "dp 2, ZeRO-1": {"parallel": {"dp": 2}, "zero": {"stage": 1}},
        "dp 2, ZeRO-2, bf16": {"parallel": {"dp": 2}, "zero": {"stage": 2}, "precision": BF16},
        "dp 2, ZeRO-3": {"parallel": {"dp": 2}, "zero": {"stage": 3}},
        "dp 2, ZeRO-3, bf16, full": {
            "parallel": {"dp": 2},
            "zero": {"stage": 3},
            "precision": BF16,
            "recompute": {"mode": "full"},
        },
        "dp 2, ZeRO-3, full, layers frozen": {
            "parallel": {"dp": 2},
            "zero": {"stage": 3},
            "recompute": {"mode": "full"},
            "train": {"freeze": ["model.layers"]},
        },
        "dp 4, ZeRO-3, full, adapters of rank 16": {
            "parallel": {"dp": 4},
            "zero": {"stage": 3},
            "recompute": {"mode": "full"},
            "lora": {"rank": 16},
        },
        "bf16, adapters of rank 16": {"precision": BF16, "lora": {"rank": 16}},
        "bf16, states on disk": {"precision": BF16, "offload": {"optimizer": "disk"}},
        "dp 2, ZeRO-3, bf16, full, all on disk": {
            "parallel": {"dp": 2},
            "zero": {"stage": 3},
            "precision": BF16,
            "recompute": {"mode": "full"},
            "offload": dict.fromkeys(("optimizer", "gradients", "parameters"), "disk"),
        },
        "dp 2, ZeRO-3, bf16, full, all on disk, vocabulary of 32,000": {
            "model": {"vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 2},
            "parallel": {"dp": 2},
            "zero": {"stage": 3},
            "precision": BF16,
            "recompute": {"mode": "full"},
            "offload": dict.fromkeys(("optimizer", "gradients", "parameters"), "disk"),
            "train": {"global_batch_size": 2, "micro_batch_size": 1, "seq_len": 128, "eval_rows": 2},
        },
        "experts": {"model": {"architecture": "mixtral", "num_local_experts": 4, "intermediate_size": 512}},
        "experts, full": {
            "model": {"architecture": "mixtral", "num_local_experts": 4, "intermediate_size": 512},
            "recompute": {"mode": "full"},
        },
        "GPT-2": {"model": {"architecture": "gpt2", "intermediate_size": 1536, "num_key_value_heads": 6}},
        "rows of 2,048": {"train": {"micro_batch_size": 1, "seq_len": 2048}},
        "rows of 2,048, selective": {
            "train": {"micro_batch_size": 1, "seq_len": 2048},
            "recompute": {"mode": "selective"},
        },
    }
)

LARGE: Final[Sections] = MappingProxyType(
    {
        "model": {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
        "parallel": {"dp": 4},
        "zero": {"stage": 3},
        "precision": BF16,
        "recompute": {"mode": "full"},
        "offload": dict.fromkeys(("optimizer", "gradients", "parameters"), "disk"),
        "train": {"steps": 1, "global_batch_size": 4, "micro_batch_size": 1},
    }
)  # the shape of examples/llama-1b.toml


@dataclass(frozen=True, slots=True)
class Measurement:
    """The memory of one rank, in bytes, beside its plan."""

    name: str
    rank: int
    measured: int
    planned: int


def configuration(data: Mapping[str, Any], sections: Sections) -> dict[str, Any]:
    """Returns a run of two steps, as plain data, with `sections` laid over the defaults."""
    base: dict[str, dict[str, Any]] = {
        "model": dict(LLAMA),
        "data": dict(data),
        "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 4, "seq_len": 512, "eval_rows": 4},
        "parallel": {"dp": 1},
        "checkpoint": {"dir": "run"},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | dict(values)
    return base


def measure(name: str, config: dict[str, Any]) -> Iterator[Measurement]:
    """Trains the model of a configuration on all ranks, and yields the memory of each."""
    plan = make_plan(parse(config, TrainConfig, name), None)
    world_size = plan.layout.world_size
    for rank, measured in enumerate(_rises(config, world_size)):
        yield Measurement(name, rank, measured, plan.cpu_memory[rank * plan.layout.pp // world_size])


def _rises(config: dict[str, Any], world_size: int) -> list[int]:
    """Returns by how many bytes the resident memory of each rank rises."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tiny = config | {"model": config["model"] | TINY | heads, "train": config["train"] | {"seq_len": 8}}
    with tempfile.TemporaryDirectory() as folder:
        runs = [each | {"checkpoint": {"dir": f"{folder}/{number}"}} for number, each in enumerate((tiny, config))]
        if "lora" in config:
            bases = [_base(each, f"{folder}/base-{number}") for number, each in enumerate(runs)]
            _run_ranks(bases, 1)
            runs = [
                each | {"model": {"init": base["checkpoint"]["dir"]}} for each, base in zip(runs, bases, strict=True)
            ]
        return _run_ranks(runs, world_size)


def _base(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the run of one process that makes the base of an adapter's run."""
    kept = {name: config[name] for name in ("model", "data", "precision") if name in config}
    return kept | {"train": config["train"] | {"steps": 1}, "checkpoint": {"dir": folder}}


def _run_ranks(runs: list[dict[str, Any]], world_size: int) -> list[int]:
    """Runs the ranks of training_memory_rank.py, and returns what they print."""
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tk.benchmarks.training_memory_rank", *map(json.dumps, runs)],
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"A rank ended with {process.returncode}:\n{errors[-2000:]}")
    return [int(printed.splitlines()[-1]) for printed, _ in outputs]


def free_port() -> int:
    """Returns a free port of this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@click.command()
@click.option("--only", default="", help="Measure only configurations with this text in their names.")
@click.option(
    "--large", is_flag=True, help="Measure 1.1 B parameters on disk instead: 40 GB of it, 20 minutes or more."
)
def main(only: str, large: bool) -> None:
    """Print a table in Markdown."""
    cpu = read_cpu()
    click.echo(f"{cpu.model}, {', '.join(cpu.instruction_sets)}\n")
    click.echo("| | rank | planned | measured | measured / planned |\n|---|---|---|---|---|")
    for name, sections in {"1.1 B, all on disk": LARGE}.items() if large else CONFIGURATIONS.items():
        if only in name:
            for each in measure(name, configuration({"cache": ".build/bench/stdlib"}, sections)):
                ratio = each.measured / each.planned
                sizes = f"{format_bytes(each.planned)} | {format_bytes(each.measured)} | {ratio:.2f}"
                click.echo(f"| {each.name} | {each.rank} | {sizes} |")


if __name__ == "__main__":
    main()
