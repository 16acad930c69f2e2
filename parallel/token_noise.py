"""Dropout whose mask is a function of token, name and feature alone, so that every layout leaves out the same values.

A counter-based generator: each word of the mask is a mix of the token's number and the feature's, without any state.
Rows that are computed again in backward, and ranks with a part of the features, get the same mask.

Letters: N any leading dims, T all of them as one, D features.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import torch

_WORD: Final = 0xFFFFFFFF
_ROW: Final = 2**32  # positions of a row; the number of a token is row * _ROW + position


@dataclass(frozen=True, slots=True)
class TokenNoise:
    """The random numbers of the tokens of a micro-batch.

    Attributes:
        keys_T: int32, a word of each token.
    """

    keys_T: torch.Tensor

    @staticmethod
    def of(seed: int, rows_N: torch.Tensor, positions_N: torch.Tensor) -> "TokenNoise":
        """Returns the random numbers of tokens.

        Args:
            seed: the run's seed.
            rows_N: int64, the number of each token's row in the run.
            positions_N: int64, the place of each token in its row.
        """
        numbers_T = (rows_N * _ROW + positions_N).flatten()
        low, high = word_of(f"{seed}/low"), word_of(f"{seed}/high")
        return TokenNoise(_mixed(_mixed(_int32(numbers_T), low) ^ _int32(numbers_T >> 32), high))

    def at(self, positions: slice, length: int) -> "TokenNoise":
        """Returns the random numbers of the tokens at some positions of each sequence of so many tokens."""
        return TokenNoise(self.keys_T.unflatten(0, (-1, length))[:, positions].flatten())

    def dropped(self, x_TD: torch.Tensor, share: float, name: torch.Tensor, first: int) -> torch.Tensor:
        """Returns a tensor without a share of its values, the others divided by 1 - share.

        Args:
            x_TD: the values of all tokens.
            share: the probability of each value to become 0.
            name: the word of the layer's name; see `word_of`.
            first: the number of the first feature.
        """
        features_D = torch.arange(first, first + x_TD.shape[1], dtype=torch.int32, device=x_TD.device)
        words_TD = _mixed(self.keys_T.unsqueeze(1) ^ _mixed(features_D, name), ~name)
        limit = round(share * 2**31)
        return (x_TD / (1 - share)).masked_fill_(words_TD.bitwise_and_(2**31 - 1) < limit, 0.0)


def word_of(name: str) -> torch.Tensor:
    """Returns a word of 32 bits that depends on a name, an int32 scalar.

    It is a tensor because torch.compile makes a program for each number, but one for all values of a tensor.
    """
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.tensor(_signed(word), dtype=torch.int32, device="cpu")


def _int32(values: torch.Tensor) -> torch.Tensor:
    """Returns the lowest 32 bits of int64 values."""
    return (((values & _WORD) ^ 2**31) - 2**31).to(torch.int32)


def _mixed(words: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a permutation of all words of 32 bits that a key chooses, of products modulo 2^32 and shifted bits."""
    words = words ^ key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words ^= (words >> shift) & (_WORD >> shift)
        words *= _signed(factor)
    words ^= (words >> 16) & 0xFFFF
    return words


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
