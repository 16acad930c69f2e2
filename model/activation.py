"""SwiGLU's gate (arXiv 2002.05202)."""

import torch
import torch.nn.functional as F


def swiglu(gate_up_NF: torch.Tensor) -> torch.Tensor:
    """[..., 2F], gate then up -> silu(gate) * up, [..., F]."""
    gate, up = gate_up_NF.chunk(2, dim=-1)
    return F.silu(gate.contiguous()) * up  # on strided rows silu's bits depend on where in the row a value lies
