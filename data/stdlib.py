"""A corpus that needs no network: Python's standard library, a tokenizer trained on its sources, and their tokens."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..core.errors import CheckpointError, ConfigError
from ..text.tokenizer import Tokenizer
from .prepare import prepare_tokens
from .publish import new_folder
from .sources import stdlib_corpus
from .token_file import TokenFile
from .tokenizer_training import train_byte_level_bpe


class PreparedStdlib(NamedTuple):
    """The folders that `prepare_stdlib` makes."""

    tokenizer: Path
    tokens: Path


def prepared_stdlib(out: Path, vocab_size: int) -> PreparedStdlib:
    """Returns the folders that `prepare_stdlib` makes below `out`, whether they exist or not."""
    home = out / f"python-{platform.python_version()}-vocab-{vocab_size}"
    return PreparedStdlib(home / "tokenizer", home / "tokens")


def prepare_stdlib(
    out: Path, vocab_size: int, progress: Callable[[str, int, int], None] = lambda phase, done, total: None
) -> PreparedStdlib:
    """Trains a tokenizer on the standard library and tokenizes it, below `out`, unless an earlier call did so.

    It takes about 8 seconds on two cores.

    Args:
        out: the folder of the cache.
        vocab_size: the size of the tokenizer's vocabulary.
        progress: a function that is called with the phase ("tokenizer" or "tokens"), bytes done and bytes in all.

    Raises:
        ConfigError: this Python has no library sources, `vocab_size` is out of range, or an earlier result is damaged.
    """
    prepared = prepared_stdlib(out, vocab_size)
    home = prepared.tokens.parent
    if not home.exists():
        try:
            with new_folder(home) as folder:
                _build(folder, vocab_size, progress)
        except ConfigError:
            if not home.exists():  # otherwise another process made the same folder at the same time
                raise
    try:
        Tokenizer.from_folder(prepared.tokenizer)
        TokenFile(prepared.tokens).verify()
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{error} {home} is a cache and can be deleted.") from error
    return prepared


def _build(folder: Path, vocab_size: int, progress: Callable[[str, int, int], None]) -> None:
    corpus = stdlib_corpus()

    def advance_in(phase: str) -> Callable[[int], None]:
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(phase, done, corpus.num_bytes)

        return advance

    tokenizer = train_byte_level_bpe(corpus.texts(advance_in("tokenizer")), vocab_size, folder / "tokenizer")
    prepare_tokens(corpus.documents(advance_in("tokens")), tokenizer, folder / "tokens")
