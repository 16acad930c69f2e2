"""Fixtures of the rooms that use text: tokenizers of both families and a small corpus, made once."""

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors, trainers

from tk.data.sources import stdlib_corpus
from tk.data.tokenizer_training import train_byte_level_bpe
from tk.text.tokenizer import Tokenizer

NON_ASCII = "naïve café — 你好，世界 😀 👩‍👩‍👧 Привет"


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """A few sources of the standard library, small enough to be tokenized quickly."""
    return [text for text in itertools.islice(stdlib_corpus().texts(), 80) if len(text) < 20_000][:40]


@pytest.fixture(scope="session")
def byte_level_folder(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer that tk trained, with the config.json of a Llama."""
    folder = tmp_path_factory.mktemp("byte_level") / "tokenizer"
    train_byte_level_bpe([*documents, NON_ASCII], 1000, folder)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_fallback_folder(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer like Llama 2's: "▁" for spaces, "<0x0A>" for bytes, <s> before every text."""
    folder = tmp_path_factory.mktemp("byte_fallback")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [word for text in documents[:8] for word in text.split(" ") if word.isascii()]
    learner.train_from_iterator(words, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    plain = json.loads(learner.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["id"] < 3]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(plain))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(3)  # stored settings that must not cut a prompt
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"clean_up_tokenization_spaces": False}))
    return folder


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture(scope="session")
def byte_fallback(byte_fallback_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_fallback_folder)
