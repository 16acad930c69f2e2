"""Packed rows: row `index` of a training run is a pure function of (seed, data, index), whoever asks, in any order."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ...core.errors import ConfigError
from .permutation import derive_key, permute
from .token_file import TokenFile

Split = Literal["train", "eval"]
PACKING: Final = "documents-in-order-1"
MIXTURE_BLOCK: Final = 4096


class PackedSource:
    """One split of one token folder, cut into rows of seq_len + 1 tokens that overlap by one.

    The eval split is the tail of the documents, `eval_fraction` of the tokens or up to half of that less, so that no
    document is in both splits; only where the documents are too long for that, one is cut in two. Every token of a
    split but its first, and less than a row at its end, is a target exactly once.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, split: Split, eval_fraction: float) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        boundary = _boundary(tokens, eval_fraction)
        self.start, self.stop = (0, boundary) if split == "train" else (boundary, tokens.meta.num_tokens)
        self.num_rows = max(0, (self.stop - self.start - 1) // seq_len)
        if not self.num_rows:
            raise ConfigError(
                f"The {split} split of {tokens.folder} has {self.stop - self.start} tokens, fewer than one "
                f"row of seq_len + 1 = {seq_len + 1}: use more data, a shorter seq_len, or another eval_fraction "
                f"(now {eval_fraction:g})."
            )

    def read_row(self, number: int) -> NDArray[np.int64]:
        """Row `number` in the order of the file."""
        start = self.start + number * self.seq_len
        return self.tokens.read(start, start + self.seq_len + 1)


class PackedDataset:
    """An endless sequence of rows, drawn from one or more token folders by weight, epoch after epoch.

    Args:
        sources: token folders and their weights (any positive numbers); a source's rows are that share of all rows, to
            1/4096.
        seq_len: inputs per row; a row has one token more.
        seed: of the order of rows. The eval split has one order for all seeds.
        split: "train", or "eval" for what is held out.
        eval_fraction: share of each source's tokens that is held out.

    Attributes:
        num_rows: rows in one epoch of all sources.
        vocab_size: of the tokenizer that all sources share.
        fingerprint: identifies sources, weights, tokenizer, seq_len, packing and held-out share.

    Raises:
        ConfigError: a source cannot be read or is shorter than one row, or tokenizers differ.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Path | str, float]],
        seq_len: int,
        seed: int,
        split: Split = "train",
        eval_fraction: float = 0.02,
    ) -> None:
        self._quotas = _quotas([weight for _, weight in sources])
        self._quota_ends = list(accumulate(self._quotas))
        files = [TokenFile(folder) for folder, _ in sources]
        _check_same_tokenizer(files)
        self.seq_len = seq_len
        self.seed = seed if split == "train" else 0
        self.sources = [PackedSource(file, seq_len, split, eval_fraction) for file in files]
        self.num_rows = sum(source.num_rows for source in self.sources)
        self.vocab_size = files[0].meta.vocab_size
        described = {
            "sources": [[file.meta.fingerprint, quota] for file, quota in zip(files, self._quotas, strict=True)],
            "tokenizer": files[0].meta.tokenizer_sha256,
            "seq_len": seq_len,
            "packing": PACKING,
            "eval_fraction": eval_fraction,
        }
        self.fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def row(self, index: int) -> NDArray[np.int64]:
        """Row `index` >= 0 of the run: int64 [seq_len + 1]."""
        number, ordinal = self._choose(index)
        source = self.sources[number]
        epoch, place = divmod(ordinal, source.num_rows)
        key = derive_key("epoch", self.seed, source.tokens.meta.fingerprint, epoch)
        return source.read_row(permute(place, source.num_rows, key))

    def _choose(self, index: int) -> tuple[int, int]:
        """The source of row `index`, and how many rows that source gave before it (but for the order within a block).

        Every block of `MIXTURE_BLOCK` rows has each source's quota of rows, in an order of its own, so that no row has
        to know of those before it.
        """
        if len(self.sources) == 1:
            return 0, index
        block, place = divmod(index, MIXTURE_BLOCK)
        place = permute(place, MIXTURE_BLOCK, derive_key("mixture", self.seed, block))
        number = bisect_right(self._quota_ends, place)
        quota = self._quotas[number]
        return number, block * quota + place - (self._quota_ends[number] - quota)


def _boundary(tokens: TokenFile, eval_fraction: float) -> int:
    """Where the held-out tail begins: at a document if one begins in the second half of the tail, else anywhere."""
    wanted = round(tokens.meta.num_tokens * eval_fraction)
    boundary = tokens.meta.num_tokens - wanted
    document = int(tokens.document_offsets[int(np.searchsorted(tokens.document_offsets, boundary))])
    return document if tokens.meta.num_tokens - document >= wanted / 2 else boundary


def _check_same_tokenizer(files: Sequence[TokenFile]) -> None:
    for file in files[1:]:
        if file.meta.tokenizer_sha256 != files[0].meta.tokenizer_sha256:
            raise ConfigError(
                f"{file.folder} and {files[0].folder} were made with different tokenizers; prepare both with one."
            )


def _quotas(weights: Sequence[float]) -> list[int]:
    """Rows of each source in a block, by largest remainder; every source has at least one."""
    if not 1 <= len(weights) <= MIXTURE_BLOCK or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"Weights {list(weights)}: give 1 to {MIXTURE_BLOCK} sources, each with a weight above 0.")
    shares = [weight / sum(weights) * MIXTURE_BLOCK for weight in weights]
    quotas = [max(1, int(share)) for share in shares]
    while (missing := MIXTURE_BLOCK - sum(quotas)) != 0:
        excess = [quota - share for quota, share in zip(quotas, shares, strict=True)]
        if missing > 0:
            quotas[excess.index(min(excess))] += 1
        else:
            quotas[quotas.index(max(quotas))] -= 1
    return quotas
