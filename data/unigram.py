"""The loss of a model of token frequencies alone: the baseline that training has to beat."""

from typing import Final

import numpy as np

from .dataset import PackedDataset

_CHUNK: Final = 1 << 22


def unigram_entropy(dataset: PackedDataset) -> float:
    """Returns the entropy of the token frequencies in a split of all sources, in nats per token."""
    counts = np.zeros(dataset.vocab_size, np.int64)
    for source in dataset.sources:
        for start in range(source.start, source.stop, _CHUNK):
            tokens = source.tokens.read(start, min(start + _CHUNK, source.stop))
            counts += np.bincount(tokens, minlength=dataset.vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
