"""The training of byte-level BPE tokenizers (Sennrich et al., arXiv 1508.07909; over bytes as in GPT-2)."""

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer
from .publish import new_folder, refuse_existing

END_OF_TEXT: Final = "<|endoftext|>"
MIN_VOCAB_SIZE: Final = 257  # 256 bytes and the end of text, so that no text has an unknown token
MAX_VOCAB_SIZE: Final = 1 << 20


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, out: Path, replaceable: Collection[str] = ()
) -> Tokenizer:
    """Trains a tokenizer on `texts` and writes it into the new folder `out`.

    Raises:
        ConfigError: see `learn_byte_level_bpe` and `write_byte_level_bpe`.
    """
    refuse_existing(out, replaceable)
    return write_byte_level_bpe(learn_byte_level_bpe(texts, vocab_size), out, replaceable)


def learn_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learns the merges of a tokenizer; the same texts in the same order give the same merges.

    Args:
        texts: the documents.
        vocab_size: the number of tokens: the end of text (id 0), 256 bytes, and merges. Few texts may give fewer.

    Raises:
        ConfigError: the vocabulary is too small or too large, or every text is empty.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"A vocabulary of {vocab_size} tokens cannot hold all bytes: vocab_size must be {MIN_VOCAB_SIZE} or more."
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise ConfigError(f"A vocabulary of {vocab_size} tokens is too large: it must have {MAX_VOCAB_SIZE} or fewer.")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(_require_text(texts), trainer)
    return backend


def write_byte_level_bpe(backend: tokenizers.Tokenizer, out: Path, replaceable: Collection[str] = ()) -> Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` reads too.

    Args:
        backend: the tokenizer.
        out: the folder to make.
        replaceable: the names that an existing folder `out` may hold and still be replaced.

    Raises:
        ConfigError: `out` exists or cannot be made.
    """
    with new_folder(out, replaceable) as folder:
        backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.from_folder(out)


def _require_text(texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts; raises ConfigError at the end if all of them were empty."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise ConfigError(
            "There is no text to train a tokenizer on: every input is empty. Name files or folders that hold text."
        )
