"""A folder of small things that users have, in which mistakes are made: text, rows, tokens, models and a run.

It is the current folder of each command, so that a command line reads as a user types it.
"""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tk.data.prepare import prepare_tokens
from tk.data.tokenizer_training import train_byte_level_bpe
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.tests.train.run_training import run_training

CONFIG: Final = """\
[model]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64

[data]
sources = [{ path = "tokens" }]
tokenizer = "tokenizer"

[train]
steps = 20
global_batch_size = 4
micro_batch_size = 2
seq_len = 24

[optimizer]
lr = 3e-3
warmup_steps = 2

[checkpoint]
dir = "runs/new"
"""
TEXTS: Final = [f"def name_{i}(x):\n    return x * {i * i}\n" * 3 for i in range(60)]


def make_world(folder: Path) -> None:
    """Fills an empty folder, which is the current one.

    It gets `train.toml`; `books` (text), `tokenizer` and `tokens` of it; `models/base` (a Llama with the tokenizer),
    `models/wide` (another one, without) and `runs/demo`, a run of `train.toml` with two steps.
    """
    (folder / "books").mkdir()
    (folder / "books" / "a.txt").write_text("".join(TEXTS))
    (folder / "train.toml").write_text(CONFIG)
    tokenizer = train_byte_level_bpe(iter(TEXTS), 301, folder / "tokenizer")
    prepare_tokens(iter(TEXTS), tokenizer, folder / "tokens")
    model = tomllib.loads(CONFIG)["model"] | {"vocab_size": 301}
    shutil.copytree(folder / "tokenizer", write_model(folder / "models" / "base", model), dirs_exist_ok=True)
    write_model(folder / "models" / "wide", model | {"hidden_size": 64})
    run = {"checkpoint": {"dir": "runs/demo"}, "train": {"steps": 2}}
    run_training({name: values | run.get(name, {}) for name, values in tomllib.loads(CONFIG).items()})


def write_model(folder: Path, model: dict[str, Any]) -> Path:
    """Writes a Hugging Face folder of random weights, without a tokenizer."""
    folder.mkdir(parents=True)
    config = ModelConfig(**model)
    torch.manual_seed(1)
    tensors = {spec.name: torch.randn(spec.shape) / 8 for spec in decoder_spec(config).table if not spec.alias}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder
