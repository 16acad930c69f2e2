"""The Hadamard transform of heads, in fp32."""

import torch

from ...kv_formats import hadamard_size


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Transforms [..., E] to fp32 [..., E], in blocks of `hadamard_size(E)`; a second time turns it back.

    Sums of pairs are added to sums of pairs (the fast Walsh-Hadamard transform), so a vector's bits depend on it alone.
    """
    size = hadamard_size(x.shape[-1])
    out = x.float()
    for half in (1 << i for i in range(size.bit_length() - 1)):
        first, second = out.unflatten(-1, (-1, 2, half)).unbind(-2)
        out = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    result: torch.Tensor = out * size**-0.5
    return result
