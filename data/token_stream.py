"""The interface of a source of tokens, whichever format it is stored in."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer
from .megatron_file import MegatronFile, is_megatron
from .token_file import TokenFile


class TokenStream(Protocol):
    """The tokens of many documents, one after another."""

    @property
    def path(self) -> Path:
        """The path that the user gave, for messages."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all documents."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary size, above every token id."""

    @property
    def tokenizer_sha256(self) -> str:
        """The SHA-256 of the tokenizer.json that made the tokens."""

    @property
    def fingerprint(self) -> str:
        """A hash of the content."""

    @property
    def masked(self) -> bool:
        """Whether some tokens may not be learned: fine-tuning data."""

    @property
    def document_offsets(self) -> NDArray[np.int64]:
        """The first token of each document, and num_tokens: int64 [documents + 1], rising."""

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the tokens [start, stop) as int64."""

    def learned(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Returns for each of the tokens [start, stop) whether the loss counts it as a target."""


def open_tokens(path: Path, tokenizer: Tokenizer | None) -> TokenStream:
    """Opens a token folder, or the pair PATH.bin and PATH.idx of Megatron-LM.

    Args:
        path: the folder, or the common prefix of the two files.
        tokenizer: the tokenizer of Megatron-LM's files, which do not name theirs.

    Raises:
        ConfigError: neither exists, the files are damaged, or Megatron-LM's files come without a tokenizer.
    """
    if path.is_dir() or not is_megatron(path):
        return TokenFile(path)
    if tokenizer is None:
        raise ConfigError(f"{path}.bin does not say which tokenizer it was made with: set [data] tokenizer.")
    return MegatronFile(path, tokenizer)
