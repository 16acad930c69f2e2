"""Packed rows: row `index` of a training run is a pure function of (seed, data, index)."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer
from .documents import DocumentRows, Split, StreamRows, split_range
from .permutation import derive_key, permute
from .row import Row
from .token_stream import TokenStream, open_tokens

Packing = Literal["concat", "documents"]
PACKINGS: Final = MappingProxyType({"concat": "documents-in-order-1", "documents": "documents-best-fit-1"})
MIXTURE_BLOCK: Final = 4096


class PackedSource:
    """One split of one source, as rows.

    Attributes:
        tokens: the source.
        start, stop: the range of the split's tokens.
        rows: the split's tokens cut or packed into rows.
        num_rows: the number of rows of an epoch, at least 1.
    """

    def __init__(
        self, tokens: TokenStream, seq_len: int, split: Split, eval_fraction: float, packing: Packing = "concat"
    ) -> None:
        self.tokens = tokens
        self.start, self.stop = split_range(tokens, split, eval_fraction)
        kind = DocumentRows if packing == "documents" else StreamRows
        self.rows: StreamRows | DocumentRows = kind(tokens, seq_len, self.start, self.stop)
        self.num_rows = self.rows.num_rows
        if not self.num_rows:
            raise ConfigError(
                f"The {split} split of {tokens.path} has {self.stop - self.start} tokens, fewer than one "
                f"row of seq_len + 1 = {seq_len + 1}: use more data, a shorter seq_len, or another eval_fraction "
                f"(now {eval_fraction:g})."
                if packing == "concat"
                else f"The {split} split of {tokens.path} has no document with a token to learn within seq_len "
                f"= {seq_len}: use more data, a longer seq_len, or another eval_fraction (now {eval_fraction:g})."
            )


class PackedDataset:
    """An endless sequence of rows, drawn from one or more token folders by weight, epoch after epoch.

    Args:
        sources: token folders, or Megatron's files (see `open_tokens`), and their weights, any positive numbers; a
            source's share of the rows is its share of the weights, rounded to 1/4096.
        seq_len: the number of inputs per row.
        seed: determines the order of rows. The eval split has one order for all seeds.
        split: "train", or "eval" for the held-out tokens.
        eval_fraction: the share of each source's tokens that is held out.
        packing: "concat" cuts the stream of all documents into rows; "documents" keeps documents whole and separate.
        tokenizer: the tokenizer of the sources that do not name theirs.

    Attributes:
        num_rows: the number of rows in one epoch of all sources.
        vocab_size: the vocabulary size of the tokenizer that all sources share.
        fingerprint: a hash of sources, weights, tokenizer, seq_len, packing and held-out share.

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
        packing: Packing = "concat",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._quotas = _quotas([weight for _, weight in sources])
        self._quota_ends = list(accumulate(self._quotas))
        files = [open_tokens(Path(path), tokenizer) for path, _ in sources]
        _check_same_tokenizer(files)
        self.seq_len, self.split = seq_len, split
        self.seed = seed if split == "train" else 0
        self.sources = [PackedSource(file, seq_len, split, eval_fraction, packing) for file in files]
        self.num_rows = sum(source.num_rows for source in self.sources)
        self.vocab_size = files[0].vocab_size
        described = {
            "sources": [[file.fingerprint, quota] for file, quota in zip(files, self._quotas, strict=True)],
            "tokenizer": files[0].tokenizer_sha256,
            "seq_len": seq_len,
            "packing": PACKINGS[packing],
            "eval_fraction": eval_fraction,
        }
        self.fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def row(self, index: int) -> Row:
        """Returns row `index` >= 0 of the run."""
        number, ordinal = self._choose(index)
        source = self.sources[number]
        epoch, place = divmod(ordinal, source.num_rows)
        key = derive_key("epoch", self.seed, source.tokens.fingerprint, epoch)
        return source.rows.read_row(permute(place, source.num_rows, key))

    def notes(self) -> list[str]:
        """Returns a line for each source of which documents were split, truncated or left out."""
        rows = (source.rows for source in self.sources)
        notes = [each.note() for each in rows if isinstance(each, DocumentRows)]
        return [f"{self.split} split of {note}" for note in notes if note]

    def _choose(self, index: int) -> tuple[int, int]:
        """Returns the number of the source of row `index`, and the ordinal of the row among that source's rows.

        Every block of `MIXTURE_BLOCK` rows holds each source's quota of rows in a shuffled order, so that a row can be
        computed without those before it.
        """
        if len(self.sources) == 1:
            return 0, index
        block, place = divmod(index, MIXTURE_BLOCK)
        place = permute(place, MIXTURE_BLOCK, derive_key("mixture", self.seed, block))
        number = bisect_right(self._quota_ends, place)
        quota = self._quotas[number]
        return number, block * quota + place - (self._quota_ends[number] - quota)


def _check_same_tokenizer(files: Sequence[TokenStream]) -> None:
    for file in files[1:]:
        if file.tokenizer_sha256 != files[0].tokenizer_sha256:
            raise ConfigError(
                f"{file.path} and {files[0].path} were made with different tokenizers; prepare both with the same one."
            )


def _quotas(weights: Sequence[float]) -> list[int]:
    """Returns the number of rows of each source per block, by largest remainder and at least one."""
    if not 1 <= len(weights) <= MIXTURE_BLOCK or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"Weights {list(weights)}: give 1 to {MIXTURE_BLOCK} sources, each with a weight above 0.")
    _, exponent = math.frexp(max(weights))
    scaled = [math.ldexp(weight, -exponent) for weight in weights]  # exact, and their sum is no infinity
    shares = [weight / sum(scaled) * MIXTURE_BLOCK for weight in scaled]
    quotas = [max(1, int(share)) for share in shares]
    while (missing := MIXTURE_BLOCK - sum(quotas)) != 0:
        excess = [quota - share for quota, share in zip(quotas, shares, strict=True)]
        if missing > 0:
            quotas[excess.index(min(excess))] += 1
        else:
            quotas[quotas.index(max(quotas))] -= 1
    return quotas
