"""Counter-based noise: the same bits for a token whatever the batch, the rank or the number of retries.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), on int64
tensors whose values stay below 2^32.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Four random 32-bit words per counter; all int64 tensors, which broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps beyond 2^63; the bits are right
        c0, c1, c2, c3 = (
            _high(product1).bitwise_xor(c1).bitwise_xor(k0),
            product1 & _MASK,
            _high(product0).bitwise_xor(c3).bitwise_xor(k1),
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(
    seed_R: torch.Tensor, sample_index_R: torch.Tensor, new_number_R: torch.Tensor, token_ids_RK: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise, float64 [R, K].

    Key = seed; counter = (sample index, number of the new token, token id, 0).

    Args:
        seed_R: int64 holding the bits of an unsigned 64-bit seed.
        token_ids_RK: int64 [R, K], or [1, K] for the same ids in every row.
    """
    seed_R1 = seed_R.unsqueeze(-1)
    key = (seed_R1 & _MASK, _high(seed_R1))
    counter = (sample_index_R.unsqueeze(-1), new_number_R.unsqueeze(-1), token_ids_RK, torch.zeros_like(seed_R1))
    word = philox4x32(counter, key)[0]
    uniform = (word.double() + 0.5) * 2.0**-32  # strictly between 0 and 1
    return uniform.log_().neg_().log_().neg_()


def _high(product: torch.Tensor) -> torch.Tensor:
    return (product >> 32) & _MASK
