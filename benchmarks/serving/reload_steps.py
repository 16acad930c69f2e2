"""The run folder of bench_reload_soak.py: steps of one model with weights of their own, and the edits of its files."""

import json
import os
import random
from pathlib import Path
from shutil import rmtree
from typing import Final

import numpy as np

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, write_part
from tk.core.casts import Array, cast
from tk.core.dtypes import BF16, FP32
from tk.core.layout import Layout
from tk.core.ownership import Owned, owned
from tk.core.tensors import with_slots
from tk.data.sources import stdlib_corpus
from tk.data.tokenizer_training import train_byte_level_bpe
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table

_SLOTS: Final = {"weight": "BF16"}
_VOCAB_SIZE: Final = 16_000
_TEMPLATE: Final = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_LARGE: Final = 16 << 20  # bytes; a larger file is not copied for an edit


def small_model(folder: Path) -> Path:
    """Writes a small random Llama with a tokenizer of 16,000 tokens and a chat template, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rmtree(folder, ignore_errors=True)
    train_byte_level_bpe(stdlib_corpus().texts(), _VOCAB_SIZE, folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **shape, num_key_value_heads=2, vocab_size=_VOCAB_SIZE, max_position_embeddings=1024, initializer_range=0.2
    )
    config.bos_token_id, config.eos_token_id = None, 0
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def save_steps(model: Path, run: Path, count: int) -> list[Path]:
    """Commits steps of a model, the first of which has its weights, and each later one other weights of a norm."""
    source = Checkpoint.open(model)
    side_files = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".json", ".jinja")}
    config = ModelConfig.from_json(json.loads(side_files["config.json"]), "config.json")
    table = with_slots(tensor_table(config), _SLOTS)

    def values(item: Owned, step: int) -> Array:
        stored = source.read(item.tensor, dtype=BF16).numpy()
        if step > 1 and item.tensor == "model.norm.weight":
            noise = np.random.default_rng(step).normal(1.0, 0.2, stored.shape).astype(np.float32)
            stored = cast(cast(stored, BF16, FP32) * noise, FP32, BF16)
        part = np.ascontiguousarray(stored[item.box.slices]).reshape(-1)
        return part if item.flat is None else part[slice(*item.flat)]

    folders = []
    with RunFolder(run).lock() as locked:
        for step in range(1, count + 1):
            folder = locked.begin_step(step)
            entries = [
                (item, "BF16", lambda item=item, step=step: values(item, step)) for item in owned(table, Layout(), 0)
            ]
            write_part(folder, 0, table, entries)
            folders.append(commit(locked, NewStep(step, table, Layout(), side_files=side_files)))
    return folders


class Edit:
    """A change of a file that lasts until it is undone: another content in place, another file, a cut, or none.

    Args:
        path: the file.
        draw: chooses the change.
    """

    def __init__(self, path: Path, draw: random.Random) -> None:
        self._path, self._kept = path, path.with_name(f".{path.name}.kept")
        self._content = path.read_bytes() if path.stat().st_size < _LARGE else None
        kinds = ["away"] if self._content is None else ["away", "other file", "cut", "in place"]
        kind = draw.choice(kinds)
        if kind in ("away", "other file"):
            os.rename(path, self._kept)
        if kind == "other file":
            path.write_bytes(b"{}\n")
        elif kind == "cut":
            os.truncate(path, draw.randrange(1 + len(self._content or b"")))
        elif kind == "in place":
            path.write_bytes(bytes(byte ^ 1 for byte in self._content or b""))

    def undo(self) -> None:
        """Gives the file its content again."""
        if self._kept.exists():
            os.rename(self._kept, self._path)
        elif self._content is not None:
            self._path.write_bytes(self._content)


def files_of(step: Path) -> list[Path]:
    """Returns all files of a step's folder."""
    return sorted(path for path in step.rglob("*") if path.is_file() and not path.name.startswith("."))
