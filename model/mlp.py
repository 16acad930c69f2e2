"""The dense feed-forward blocks, which every token passes. Letters: N any leading dims, D hidden size."""

import torch
from torch import nn

from ..parallel.functions import SEQUENCE
from ..parallel.layers import ColumnParallelLinear, RowParallelLinear
from ..parallel.linear import Activation
from ..parallel.mlp_blocks import MLPBlocks
from ..parallel.token_noise import TokenNoise
from .activation import gelu_new, swiglu
from .placement import Placement
from .recompute import recomputed


class GatedMLP(nn.Module):
    """A gated block, down(silu(gate(x)) * up(x)), with gate and up fused."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.gate_up_proj = place.column(f"model.layers.{layer}.mlp.gate_up_proj")
        self.down_proj = place.row(f"model.layers.{layer}.mlp.down_proj")
        self.block = place.mlp_block

    def forward(self, x_ND: torch.Tensor, noise: TokenNoise | None = None) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]; `noise` is for dropout of adapters."""
        return _feed_forward(x_ND, noise, self.gate_up_proj, self.down_proj, swiglu, self.block)


class PlainMLP(nn.Module):
    """A block without a gate, down(gelu(up(x)))."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.up_proj = place.column(f"model.layers.{layer}.mlp.up_proj")
        self.down_proj = place.row(f"model.layers.{layer}.mlp.down_proj")
        self.block = place.mlp_block

    def forward(self, x_ND: torch.Tensor, noise: TokenNoise | None = None) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]; `noise` is for dropout of adapters."""
        return _feed_forward(x_ND, noise, self.up_proj, self.down_proj, gelu_new, self.block)


def _feed_forward(
    x_ND: torch.Tensor,
    noise: TokenNoise | None,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    activation: Activation,
    num_rows: int,
) -> torch.Tensor:
    """Maps hidden states [..., D] to [..., D], in blocks of `num_rows` positions if that is not 0."""
    if not num_rows:
        return _block(x_ND, noise, up, down, activation)
    if all(layer.adapter is None and layer.codes is None for layer in (up, down)):
        return MLPBlocks(up, down, activation, num_rows)(x_ND)
    length, outputs = x_ND.shape[SEQUENCE], []
    for start in range(0, length, num_rows):
        positions = slice(start, start + num_rows)
        own = noise and noise.at(positions, length)
        outputs.append(recomputed(_block, x_ND[..., positions, :], own, up, down, activation))
    return torch.cat(outputs, SEQUENCE)


def _block(
    x_ND: torch.Tensor,
    noise: TokenNoise | None,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    activation: Activation,
) -> torch.Tensor:
    return down(up(x_ND, noise), activation, noise)  # type: ignore[no-any-return]
