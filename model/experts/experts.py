"""The experts of a layer: their weights, and their products for tokens that are sorted by expert.

Letters: P pairs of a token and one of its experts, D hidden size, I intermediate size of an expert on this rank, E
experts, F out features of one expert.
"""

from functools import partial

import torch
from torch import nn

from ...parallel.grouped_products import grouped_linear
from ...parallel.row_groups import RowGroups
from ..activation import swiglu
from ..placement import Placement
from ..recompute import recomputed
from .adapted import ExpertAdapters


class Experts(nn.Module):
    """This rank's SwiGLU experts, whose weights are stacked along dim 0 in one parameter per kind."""

    def __init__(self, name: str, place: Placement) -> None:
        super().__init__()
        self.num_experts = place.shapes[f"{name}.down_proj"][0] // place.spec.hidden_size
        self.activation = partial(recomputed, swiglu) if place.recompute == "selective" else swiglu
        self.gate_up_proj = place.empty(f"{name}.gate_up_proj")
        self.down_proj = place.empty(f"{name}.down_proj")
        self.gate_up_proj_adapter = ExpertAdapters.of(f"{name}.gate_up_proj", self.num_experts, place)
        self.down_proj_adapter = ExpertAdapters.of(f"{name}.down_proj", self.num_experts, place)

    def forward(self, x_PD: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """Maps tokens [P, D] to their experts' outputs [P, D].

        Args:
            x_PD: the tokens of the first expert, then those of the second one, and so on.
            groups: the tokens of each expert.
        """
        gate_up, down = self.weights()
        inner_PI = self.activation(_product(x_PD, gate_up, self.gate_up_proj_adapter, groups))
        return _product(inner_PI, down, self.down_proj_adapter, groups)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all experts' gate and up, [E, 2I, D], and down, [E, D, I]."""
        gate_up, down = (weight.unflatten(0, (self.num_experts, -1)) for weight in (self.gate_up_proj, self.down_proj))
        return gate_up, down


def _product(
    x_PD: torch.Tensor, weight_EFD: torch.Tensor, adapters: ExpertAdapters | None, groups: RowGroups
) -> torch.Tensor:
    """Returns the product of each expert's tokens and weight, [P, F], with that of its adapters."""
    y_PF = grouped_linear(x_PD, weight_EFD, groups)
    return y_PF if adapters is None else y_PF + adapters(x_PD, groups)
