"""Writes the tables of docs/sizing.md with the planner of `tk plan` (`make map`); a test compares the page."""

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

from tk.core.config import parse
from tk.core.progress import format_bytes
from tk.infer.engine.kv_formats import KV_DTYPES
from tk.infer.engine.planning.model_bytes import kv_bytes_per_rank, weight_bytes_per_rank
from tk.model.config import ModelConfig
from tk.train.config.train_config import TrainConfig
from tk.train.planning.plan import RunPlan, make_plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sizing.md"
GPUS: Final = 8
STAGES: Final = (0, 1, 2, 3)
Values = dict[str, dict[str, Any]]


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab_size: int) -> dict[str, Any]:
    """Returns the keys of a shape."""
    return {
        "architecture": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
    }


# The shapes of models that many people know, by their rounded number of parameters.
SHAPES: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "5.3 M": llama(256, 704, 4, 4, 4, 4096),
        "32 M": llama(512, 1408, 8, 8, 4, 8192),
        "0.16 B": llama(768, 2048, 12, 12, 12, 49152),
        "1.1 B": llama(2048, 5632, 22, 32, 4, 32000),
        "8 B": llama(4096, 14336, 32, 32, 8, 128256),
        "70 B": llama(8192, 28672, 80, 64, 8, 128256),
    }
)
SMALL: Final = ("5.3 M", "32 M", "0.16 B", "1.1 B")
LARGE: Final = ("0.16 B", "1.1 B", "8 B", "70 B")


def plan_of(shape: Mapping[str, Any], *, ranks: int = 1, **sections: dict[str, Any]) -> RunPlan:
    """Returns the plan of a run, as `tk plan` makes it."""
    values: Values = {"model": dict(shape), "data": {"cache": "nowhere"}, "checkpoint": {"dir": "nowhere/run"}}
    return make_plan(parse(values | sections, TrainConfig, "a table"), ranks)


def on_device(plan: RunPlan) -> int:
    """Returns the bytes that a rank's tensors take on its device, activations included."""
    return sum(plan.memory[0].device.values())


def states_table(precision: str) -> list[list[str]]:
    """Returns the rows of the memory of a GPU, by parameters and ZeRO stage: one row of 2,048 tokens at a time."""
    train = {"seq_len": 2048, "micro_batch_size": 1, "global_batch_size": GPUS}
    rows = []
    for name in LARGE:
        plans = [
            plan_of(
                SHAPES[name],
                ranks=GPUS,
                train=train,
                precision={"params": precision},
                zero={"stage": stage},
                recompute={"mode": "full"},
            )
            for stage in STAGES
        ]
        rows.append([name, *(format_bytes(on_device(plan)) for plan in plans)])
    return [["parameters", *(f"stage {stage}" for stage in STAGES)], *rows]


def activations_table() -> list[list[str]]:
    """Returns the rows of the memory of activations for one row of 2,048 tokens in bf16, by recomputation."""
    modes = ("none", "selective", "full")
    rows = []
    for name in LARGE:
        cells = []
        for mode in modes:
            train = {"seq_len": 2048, "micro_batch_size": 1, "global_batch_size": 1}
            plan = plan_of(SHAPES[name], train=train, precision={"params": "bf16"}, recompute={"mode": mode})
            cells.append(format_bytes(plan.memory[0].device["activations"]))
        rows.append([name, *cells])
    return [["parameters", *(f'`"{mode}"`' for mode in modes)], *rows]


def cpu_table() -> list[list[str]]:
    """Returns the rows of the memory of one process on a CPU: 8 rows of 512 tokens at once."""
    train = {"seq_len": 512, "micro_batch_size": 8, "global_batch_size": 8}
    rows = []
    for name in SMALL:
        plans = [plan_of(SHAPES[name], train=train, precision={"params": dtype}) for dtype in ("fp32", "bf16")]
        rows.append([name, *(format_bytes(plan.cpu_memory[0]) for plan in plans)])
    return [["parameters", "fp32", "bf16"], *rows]


def adapter_table() -> list[list[str]]:
    """Returns the rows of the memory of one GPU that trains an adapter of rank 16, by the dtype of its base."""
    bases = ("auto", "int8", "int4")
    rows = []
    with TemporaryDirectory() as folder:
        for name in LARGE:
            path = write_shape(Path(folder) / name.replace(" ", "-"), SHAPES[name])
            train = {"seq_len": 2048, "micro_batch_size": 1, "global_batch_size": 1}
            plans = [
                plan_of(
                    {"init": str(path)},
                    lora={"rank": 16, "base": base},
                    train=train,
                    precision={"params": "bf16"},
                    recompute={"mode": "full"},
                )
                for base in bases
            ]
            rows.append([name, *(format_bytes(on_device(plan)) for plan in plans)])
    return [["parameters of the base", "base in bf16", "in int8", "in int4"], *rows]


def write_shape(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Writes a model's folder without weights, of which the planner reads the shape alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ModelConfig(**shape).to_json()))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


def weights_table() -> list[list[str]]:
    """Returns the rows of the memory of served weights, by dtype."""
    dtypes = ("fp32", "bf16", "int8", "int4")
    rows = []
    for name in SHAPES:
        config = ModelConfig(**SHAPES[name])
        sizes = (
            weight_bytes_per_rank(config, 1, dtype, "auto")
            if dtype in ("fp32", "bf16")
            else weight_bytes_per_rank(config, 1, "bf16", dtype)
            for dtype in dtypes
        )
        rows.append([name, *map(format_bytes, sizes)])
    return [["parameters", *dtypes], *rows]


def cache_table() -> list[list[str]]:
    """Returns the rows of the KV cache's bytes per token, by dtype."""
    rows = []
    for name in SHAPES:
        config = ModelConfig(**SHAPES[name])
        rows.append([name, *(f"{kv_bytes_per_rank(config, 1, dtype):,}" for dtype in KV_DTYPES)])
    return [["parameters", *KV_DTYPES], *rows]


TABLES: Final[Mapping[str, Callable[[], list[list[str]]]]] = MappingProxyType(
    {
        "states-bf16": lambda: states_table("bf16"),
        "states-fp32": lambda: states_table("fp32"),
        "activations": activations_table,
        "adapters": adapter_table,
        "cpu": cpu_table,
        "weights": weights_table,
        "cache": cache_table,
    }
)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    head, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return head + "|" + "---|" * len(rows[0]) + "\n" + "".join(rest)


def place_of(name: str) -> re.Pattern[str]:
    """Returns the place of a table on the page: the lines after its mark."""
    return re.compile(rf"(<!-- table: {name} -->\n\n)((?:\|.*\n)*)")


def shown(name: str, page: str) -> str:
    """Returns a table as the page has it; raises ValueError if the page has no place for it."""
    match = place_of(name).search(page)
    if match is None:
        raise ValueError(f"{PAGE} has no line <!-- table: {name} -->, with an empty line after it")
    return match[2]


def main() -> None:
    """Writes all tables into the page."""
    page = PAGE.read_text()
    for name, rows in TABLES.items():
        shown(name, page)
        page = place_of(name).sub(rf"\g<1>{markdown(rows())}", page)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
