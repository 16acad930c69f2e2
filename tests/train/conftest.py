"""A small corpus and the configuration of a small run on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.data.prepare import prepare_tokens
from tk.data.sources import find_corpus
from tk.data.tokenizer_training import train_byte_level_bpe
from tk.text.tokenizer import Tokenizer

Configure = Callable[..., dict[str, Any]]


def _documents() -> list[str]:
    names = ["alpha", "beta", "gamma", "delta"]
    return [f"def {names[i % 4]}_{i}(x):\n    return x * {i * i} + {names[i // 4 % 4]}\n" * 3 for i in range(400)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tokenizer` (vocabulary of 301, which no tp divides) and `tokens`."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = train_byte_level_bpe(iter(_documents()), 301, folder / "tokenizer")
    prepare_tokens(iter(_documents()), tokenizer, folder / "tokens")
    return folder


@pytest.fixture(scope="session")
def examples(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and answers of many lengths, with the corpus's tokenizer, as a token folder."""
    folder = tmp_path_factory.mktemp("examples") / "tokens"
    lines = [{"prompt": f"{'x' * (i % 7)} = ", "response": f"{i * i}\n" * (1 + i % 3)} for i in range(300)]
    path = folder.with_name("examples.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare_tokens(find_corpus([path]).documents(), Tokenizer.from_folder(corpus / "tokenizer"), folder)
    return folder


@pytest.fixture
def configure(corpus: Path, tmp_path: Path) -> Configure:
    """Makes a TrainConfig as plain data; arguments are sections laid over the defaults."""

    def make(run: str = "run", **sections: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, dict[str, Any]] = {
            "model": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
            "data": {"sources": [{"path": str(corpus / "tokens")}], "tokenizer": str(corpus / "tokenizer")},
            "train": {
                "steps": 20,
                "global_batch_size": 6,
                "micro_batch_size": 2,
                "seq_len": 24,
                "log_every": 1,
                "eval_rows": 5,
            },
            "optimizer": {"lr": 3e-3, "warmup_steps": 4},
            "zero": {"bucket_size": 3000},
            "checkpoint": {"dir": str(tmp_path / run), "keep": 0},
        }
        for name, values in sections.items():
            config.setdefault(name, {}).update(values)
        if "warmup_steps" not in sections.get("optimizer", {}):
            config["optimizer"]["warmup_steps"] = min(4, config["train"]["steps"])
        return config

    return make


@pytest.fixture
def write_toml(tmp_path: Path) -> Callable[[dict[str, Any], str], Path]:
    """Writes a configuration as a TOML file (two levels, JSON's spelling of values is TOML's here)."""

    def write(config: dict[str, Any], name: str = "config.toml") -> Path:
        lines = []
        for section, values in config.items():
            lines.append(f"[{section}]")
            for key, value in values.items():
                if value is None:
                    continue
                text = (
                    json.dumps(value) if key != "sources" or value == "stdlib" else f'[{{path = "{value[0]["path"]}"}}]'
                )
                lines.append(f"{key} = {text}")
        path = tmp_path / name
        path.write_text("\n".join(lines))
        return path

    return write
