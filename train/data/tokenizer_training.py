"""Training a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909; over bytes, as GPT-2): all text is known."""

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ...core.errors import ConfigError
from ...model.tokenizer import Tokenizer
from .publish import new_folder, refuse_existing

END_OF_TEXT: Final = "<|endoftext|>"
MIN_VOCAB_SIZE: Final = 257  # every byte, and the end of text
MAX_VOCAB_SIZE: Final = 1 << 20


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, out: Path, replaceable: Collection[str] = ()
) -> Tokenizer:
    """Learns merges from `texts` and writes tokenizer.json and tokenizer_config.json into the new folder `out`.

    The same texts in the same order give the same files. A small corpus may have fewer than `vocab_size` tokens in it.

    Args:
        texts: documents.
        vocab_size: tokens in all: the end of text (id 0), 256 bytes, merges.
        out: the folder to make; `transformers.AutoTokenizer` reads it too.
        replaceable: see `new_folder`.

    Raises:
        ConfigError: the vocabulary is too small or too large, there is no text, or `out` is taken.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"A vocabulary of {vocab_size} cannot hold all bytes; it must be {MIN_VOCAB_SIZE} or more.")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ConfigError(f"A vocabulary of {vocab_size} is too large; it must be {MAX_VOCAB_SIZE} or less.")
    refuse_existing(out, replaceable)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(_some(texts), trainer)
    with new_folder(out, replaceable) as folder:  # late, so that a kill during the long part leaves nothing behind
        backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.from_folder(out)


def _some(texts: Iterable[str]) -> Iterator[str]:
    """The texts; ConfigError if all of them are empty."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise ConfigError("There is no text to learn from: every input is empty.")
