"""The shared expert of a mixture, which every token passes beside its own ones (arXiv 2401.06066, section 3.2).

Letters: T tokens, D hidden size.
"""

from functools import partial

import torch
from torch import nn

from ...parallel.layers import adapter_call
from ...parallel.linear import ParallelProduct
from ...parallel.mesh import ALONE
from ...parallel.token_noise import TokenNoise
from ..activation import swiglu
from ..placement import Placement
from ..recompute import recomputed


class LocalLinear(nn.Module):
    """A linear layer without bias by this rank's part of a weight, without communication."""

    def __init__(self, name: str, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(f"{name}.weight")
        self.adapter = place.adapter(f"{name}.weight")
        self.product = ParallelProduct("column", ALONE)

    def forward(self, x_ND: torch.Tensor, noise: TokenNoise | None = None) -> torch.Tensor:
        """Maps [..., D] to [..., F]; `noise` is for dropout of adapters."""
        return self.product(x_ND, self.weight, adapter=adapter_call(self.adapter, len(self.weight), noise))


class SharedExpert(nn.Module):
    """A gated block that is split over tensor-parallel ranks, weighted by a sigmoid if the model has a gate for it.

    Args:
        name: the full name of the block.
        place: the rank's place.
    """

    def __init__(self, name: str, place: Placement) -> None:
        super().__init__()
        self.activation = partial(recomputed, swiglu) if place.recompute == "selective" else swiglu
        self.gate_up_proj = LocalLinear(f"{name}.gate_up_proj", place)
        self.down_proj = LocalLinear(f"{name}.down_proj", place)

    def forward(self, x_TD: torch.Tensor, gate: LocalLinear | None, noise: TokenNoise | None = None) -> torch.Tensor:
        """Maps tokens [T, D], replicated, to this rank's part of the output [T, D]; its gradient is partial too.

        Args:
            x_TD: the tokens.
            gate: the layer that scores the output's weight, replicated; None for a weight of 1.
            noise: the random numbers of the tokens, for dropout of adapters.
        """
        y_TD: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x_TD, noise)), noise)
        if gate is not None:
            y_TD = (y_TD.float() * gate(x_TD).float().sigmoid()).to(y_TD.dtype)
        return y_TD
