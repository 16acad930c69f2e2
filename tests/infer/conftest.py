"""Tiny random models as Hugging Face folders, engines shared by the room's tests, and a runner without processes."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tk.infer import LLM
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.worker.worker import load
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.serve.conftest import engine, server

__all__ = ["engine", "server"]  # a scripted engine, for the client

VOCAB = 264  # 256 bytes, 7 pairs and an end
EOS = 263
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 24},
    "long heads": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "head_dim": 520,
    },
}


def _write_tokenizer(folder: Path) -> None:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("e", "r"), ("i", "n"), ("a", "b"), ("ab", "c"), ("o", "n"), ("r", "e")]
    vocab |= {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the random Llama of that name in SHAPES, with a byte-level tokenizer whose end is token 263."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            config = LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                max_position_embeddings=640,
                initializer_range=0.2,
                bos_token_id=None,
                eos_token_id=EOS,
                **SHAPES[name],
            )
            torch.manual_seed(7)
            LlamaForCausalLM(config).save_pretrained(made[name])
            _write_tokenizer(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="session")
def reference(model_folder: Callable[[str], Path]) -> Callable[[str], LlamaForCausalLM]:
    """The same model in `transformers`, loaded once."""

    @cache
    def load(name: str) -> LlamaForCausalLM:
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(model_folder(name)).eval()
        return model

    return load


@pytest.fixture(scope="session")
def llm(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    """One rank, fp32, a cache that few long sequences fill and steps that cut a long prompt."""
    with LLM(model_folder("grouped"), kv_blocks=40, block_size=16, max_batched_tokens=48, max_running=24) as llm:
        yield llm


@pytest.fixture(scope="session")
def llm_tp2(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    """The same model over two ranks."""
    with LLM(model_folder("grouped"), tp=2, kv_blocks=64) as llm:
        yield llm


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A collector of spans, which are sent within 20 ms; for tests that the extra otel is installed for."""
    from tk.tests.infer.serve.metrics.collector import Collector

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def make_runner(model_folder: Callable[[str], Path]) -> Callable[..., Backend]:
    """A backend in this process: folder or name of the model, dtype, KV dtype, number of blocks of 16 tokens."""

    def make(
        model: str | Path, dtype: str, kv_dtype: str, num_blocks: int, kernels: str = "aten", num_twins: int = 0
    ) -> Backend:
        folder = model if isinstance(model, Path) else model_folder(model)
        size = (num_blocks, 0, BLOCK_SIZE, 512)
        return load(Job(str(folder), kernels, dtype, kv_dtype, *size, num_twins=num_twins))

    return make
