"""What rows are cut from: tokens of many documents, one after another, however they lie on disk."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer
from .megatron_file import MegatronFile, is_megatron
from .token_file import TokenFile


class TokenStream(Protocol):
    """Tokens of many documents."""

    @property
    def path(self) -> Path:
        """What the user calls it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def tokenizer_sha256(self) -> str:
        """Of the tokenizer.json that they were made with."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content."""

    @property
    def masked(self) -> bool:
        """Whether some tokens are read but not learned: fine-tuning data."""

    @property
    def document_offsets(self) -> NDArray[np.int64]:
        """int64 [documents + 1], rising from 0 to num_tokens."""

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop)."""

    def learned(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens [start, stop) the loss counts as targets."""


def open_tokens(path: Path, tokenizer: Tokenizer | None) -> TokenStream:
    """A token folder, or Megatron's pair of files PATH.bin and PATH.idx, which says nothing of its tokenizer.

    Raises:
        ConfigError: there is neither, it is damaged, or Megatron's files come without a tokenizer.
    """
    if path.is_dir() or not is_megatron(path):
        return TokenFile(path)
    if tokenizer is None:
        raise ConfigError(f"{path}.bin does not say which tokenizer it was made with: name it as [data] tokenizer.")
    return MegatronFile(path, tokenizer)
