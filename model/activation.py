"""Activations of feed-forward blocks: SwiGLU's gate (arXiv 2002.05202), GELU (arXiv 1606.08415)."""

import torch
import torch.nn.functional as F


def swiglu(gate_up_NF: torch.Tensor) -> torch.Tensor:
    """[..., 2F], gate then up -> silu(gate) * up, [..., F]."""
    gate, up = gate_up_NF.chunk(2, dim=-1)
    return F.silu(gate.contiguous()) * up  # on strided rows silu's bits depend on where in the row a value lies


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")
