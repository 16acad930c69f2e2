"""Feed-forward blocks that every token goes through. Letters: N any leading dims, D hidden size."""

import torch
import torch.nn.functional as F
from torch import nn

from .activation import swiglu
from .placement import Placement


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.gate_up_proj = place.column(f"model.layers.{layer}.mlp.gate_up_proj")
        self.down_proj = place.row(f"model.layers.{layer}.mlp.down_proj")

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(swiglu(self.gate_up_proj(x_ND)))  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """down(gelu(up(x))), GELU in its tanh form (arXiv 1606.08415)."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.up_proj = place.column(f"model.layers.{layer}.mlp.up_proj")
        self.down_proj = place.row(f"model.layers.{layer}.mlp.down_proj")

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(F.gelu(self.up_proj(x_ND), approximate="tanh"))  # type: ignore[no-any-return]
