"""The dense feed-forward blocks, which every token passes. Letters: N any leading dims, D hidden size."""

import torch
from torch import nn

from ..parallel.mlp_blocks import MLPBlocks
from .activation import gelu_new, swiglu
from .placement import Placement


class GatedMLP(nn.Module):
    """A gated block, down(silu(gate(x)) * up(x)), with gate and up fused."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.gate_up_proj = place.column(f"model.layers.{layer}.mlp.gate_up_proj")
        self.down_proj = place.row(f"model.layers.{layer}.mlp.down_proj")
        self.block = place.mlp_block

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]."""
        if self.block:
            return MLPBlocks(self.gate_up_proj, self.down_proj, swiglu, self.block)(x_ND)
        return self.down_proj(self.gate_up_proj(x_ND), swiglu)  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """A block without a gate, down(gelu(up(x)))."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.up_proj = place.column(f"model.layers.{layer}.mlp.up_proj")
        self.down_proj = place.row(f"model.layers.{layer}.mlp.down_proj")
        self.block = place.mlp_block

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]."""
        if self.block:
            return MLPBlocks(self.up_proj, self.down_proj, gelu_new, self.block)(x_ND)
        return self.down_proj(self.up_proj(x_ND), gelu_new)  # type: ignore[no-any-return]
