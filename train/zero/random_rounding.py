"""Stochastic rounding of fp32 to bf16 in torch; `adamw.c` has the same in C, bit by bit.

A value between two bf16 numbers becomes the upper one with a probability of its distance to the lower one. The mean of
many roundings is the value. To the nearest, a second moment stops growing at beta2 = 0.999: a step adds at most 1/1000
of it, and two bf16 numbers are at least 1/256 apart.
"""

from typing import Final

import torch

from .element_index import ElementIndex, RandomBits

_WORD: Final = 0xFFFFFFFF


def random_bits(low: torch.Tensor, high: torch.Tensor, key: int) -> torch.Tensor:
    """Returns 16 random bits of each counter; `random_bits` of adamw.c says by which function.

    Args:
        low, high: the words of the counters, int64 [n] in [0, 2^32); `high` also has the key's second word.
        key: the key's first word, in [0, 2^32).

    Returns:
        int64 [n] in [0, 2^16).
    """
    x = low ^ key
    x = ((x ^ x >> 17) * 0xED5AD4BB & _WORD) ^ high  # modulo 2^32
    x = (x ^ x >> 11) * 0xAC4C1B51 & _WORD
    x = (x ^ x >> 15) * 0x31848BAB & _WORD
    return x >> 16


def indexes(index: ElementIndex, count: int, device: torch.device) -> torch.Tensor:
    """Returns the indexes of the first `count` elements, int64 [count]."""
    number = torch.arange(index.start, index.start + count, device=device)
    return index.first + number // index.run * index.stride + number % index.run


def round_randomly(values: torch.Tensor, bits: RandomBits, step: int) -> torch.Tensor:
    """Rounds values to bf16, up or down by random bits; infinities stay infinite, and NaN stays NaN.

    Args:
        values: fp32 [n].
        bits: the random bits of these elements.
        step: the step that draws them.

    Returns:
        bf16 [n].
    """
    key, word = bits.key(step)
    index = indexes(bits.index, values.numel(), values.device)
    random = random_bits(index & _WORD, (index >> 32) + word & _WORD, key)
    rounded = (values.view(torch.int32).long() & _WORD) + random >> 16
    result = rounded.to(torch.int16).view(torch.bfloat16)
    return result.masked_fill_(values.isnan(), torch.nan)
