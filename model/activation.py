"""The activations of feed-forward blocks: SwiGLU's gate (arXiv 2002.05202) and GELU (arXiv 1606.08415)."""

import torch
import torch.nn.functional as F


def swiglu(gate_up_NF: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up [..., F] of gate and up, concatenated as [..., 2F]."""
    gate, up = gate_up_NF.chunk(2, dim=-1)
    return F.silu(gate.contiguous()) * up  # on strided rows the bits of silu depend on a value's place in its row


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """Returns GELU in its tanh approximation, elementwise."""
    return F.gelu(x, approximate="tanh")
