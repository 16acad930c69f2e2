"""Steps of a run whose weights make one token certain, whatever the prompt: the step's own."""

import json
from pathlib import Path

import numpy as np

from tk.checkpoint import NewStep, RunFolder, commit, write_part
from tk.core.casts import Array
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import with_slots
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table
from tk.tests.checkpoint.saving import cut

SLOTS = {"weight": "F32"}
FIRST_TOKEN = 33  # a printable byte of the tiny model's tokenizer


def token_of(step: int) -> int:
    return FIRST_TOKEN + step


def save_forced_step(run: Path, model: Path, step: int, **changes: object) -> Path:
    """Commits a step of `write_tiny_model`'s model, with changes of its config."""
    config = json.loads((model / "config.json").read_text()) | changes
    shape = ModelConfig.from_json(config, "config.json")
    table = with_slots(tensor_table(shape), SLOTS)
    side_files = {"config.json": json.dumps(config).encode(), "tokenizer.json": (model / "tokenizer.json").read_bytes()}
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(step)
        values = {spec.name: _forced(spec.name, spec.shape, token_of(step)) for spec in table}
        entries = [(item, "F32", cut(values[item.tensor], item)) for item in owned(table, Layout(), 0)]
        write_part(folder, 0, table, entries)
        return commit(locked, NewStep(step, table, Layout(), side_files=side_files))


def damage(step: Path) -> None:
    """Flips a bit of the largest file of weights."""
    path = max(step.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def _forced(name: str, shape: tuple[int, ...], token: int) -> Array:
    """All hidden states are alike: attention and products add nothing to them, and one row of the head is not 0."""
    if name.endswith("lm_head.weight"):
        head = np.zeros(shape, np.float32)
        head[token] = 4.0
        return head
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return np.zeros(shape, np.float32)
    return np.ones(shape, np.float32)
