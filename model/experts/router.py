"""The choice of experts: scores by a linear layer, and the top K of them for each token.

Letters: T tokens, D hidden size, E experts, K of them per token.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ...parallel.products import linear
from ..placement import Placement
from ..spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The experts of each token.

    Attributes:
        probabilities_TE: the probabilities of all experts, fp32.
        weights_TK: the weights of the chosen experts, fp32.
        chosen_TK: their numbers, int64.
    """

    probabilities_TE: torch.Tensor
    weights_TK: torch.Tensor
    chosen_TK: torch.Tensor


class Router(nn.Module):
    """The linear layer that scores every expert for every token, and the choice by these scores."""

    def __init__(self, name: str, experts: ExpertsSpec, place: Placement) -> None:
        super().__init__()
        self.top_k, self.normalize = experts.top_k, experts.normalize
        self.weight = place.empty(f"{name}.weight")

    def forward(self, x_TD: torch.Tensor) -> ExpertChoice:
        """Chooses experts for tokens [T, D]."""
        probabilities_TE = linear(x_TD, self.weight).float().softmax(dim=-1)
        weights_TK, chosen_TK = self.choose(probabilities_TE)
        return ExpertChoice(probabilities_TE, weights_TK, chosen_TK)

    def choose(self, probabilities_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights and numbers of each token's experts, [T, K] both."""
        weights_TK, chosen_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK, chosen_TK
