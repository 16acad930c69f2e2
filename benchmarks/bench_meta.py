"""The memory of `initialize` for a model that was built on meta: at most what an engine holds and the largest unit.

Measured is by how much a rank's resident memory rises at most from an empty engine to a full one, beside the tensors
that are in memory then and the largest unit (a block, or all parameters outside of blocks) as the module makes it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from tk.benchmarks.bench_training_memory import LARGE, free_port
from tk.core.cpu import read_cpu
from tk.core.progress import format_bytes

ROOM: Final = 1.1
LLAMA_1B: Final = {**LARGE["model"], "max_position_embeddings": 4096}
SMALL: Final[Mapping[str, int]] = dict(LLAMA_1B) | {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 10,
}


@dataclass(frozen=True, slots=True)
class MetaCase:
    """A model and the arguments of `initialize`.

    Attributes:
        name: the name in the table.
        shape: the keys of a LlamaConfig.
        options: the arguments of `initialize`.
        world_size: the number of ranks.
    """

    name: str
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class MetaFigures:
    """What one rank measured, in bytes and seconds.

    Attributes:
        built: the peak while the model was built.
        peak: the peak of all.
        resident: the tensors that are in memory at the end.
        unit: the largest unit.
        seconds: the time of both.
    """

    built: int
    peak: int
    resident: int
    unit: int
    seconds: float

    @property
    def allowed(self) -> int:
        """The peak that is promised."""
        return int(ROOM * (self.resident + self.unit))


DISK: Final = MappingProxyType({"optimizer": "disk"})
ALL_ON_DISK: Final = MappingProxyType({"optimizer": "disk", "gradients": "disk", "parameters": "disk"})
CASES: Final = (
    MetaCase("135 M, fp32", SMALL, {"zero": 3}),
    MetaCase("135 M, bf16", SMALL, {"zero": 3, "precision": "bf16"}),
    MetaCase("135 M, bf16, 2 ranks", SMALL, {"zero": 3, "precision": "bf16"}, 2),
    MetaCase("1.1 B, bf16, states on disk, 2 ranks", LLAMA_1B, {"zero": 3, "precision": "bf16", "offload": DISK}, 2),
    MetaCase(
        "1.1 B, bf16, all on disk, 4 ranks", LLAMA_1B, {"zero": 3, "precision": "bf16", "offload": ALL_ON_DISK}, 4
    ),
)


def measure(case: MetaCase, folder: Path) -> list[MetaFigures]:
    """Returns the figures of each rank; files of states are in `folder`."""
    options = dict(case.options)
    if "offload" in options:
        options["offload"] = dict(options["offload"]) | {"folder": str(folder)}
    text = json.dumps({"shape": dict(case.shape), "options": options})
    common = {"WORLD_SIZE": str(case.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tk.benchmarks.meta_rank", text],
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.world_size)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"A rank ended with {process.returncode}:\n{errors[-2000:]}")
    found = [json.loads(printed.splitlines()[-1]) for printed, _ in outputs]
    return [MetaFigures(each["built"], each["peak"], each["resident"], each["unit"], each["seconds"]) for each in found]


@click.command()
@click.option("--only", default="", help="Measure only cases with this text in their names.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files of states are.  [a temporary folder]")
def main(only: str, folder: Path | None) -> None:
    """Print a table in Markdown."""
    cpu = read_cpu()
    click.echo(f"{cpu.model}, {', '.join(cpu.instruction_sets)}\n")
    click.echo("| | rank | built | peak | resident | largest unit | peak / (resident + unit) | s |")
    click.echo("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            for rank, each in enumerate(measure(case, folder or Path(temporary))):
                sizes = " | ".join(map(format_bytes, (each.built, each.peak, each.resident, each.unit)))
                ratio = each.peak / (each.resident + each.unit)
                click.echo(f"| {case.name} | {rank} | {sizes} | {ratio:.2f} | {each.seconds:.0f} |")


if __name__ == "__main__":
    main()
