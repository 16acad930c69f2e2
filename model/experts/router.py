"""The choice of experts: scores by a linear layer, and the top K of them for each token.

Letters: T tokens, D hidden size, E experts, K of them per token, G groups of experts.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ...parallel.products import wide_linear
from ..placement import Placement
from ..spec import ExpertsSpec

_LEAST_SUM = 1e-20  # as transformers has it: the weights of a token's experts may all be 0


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The experts of each token.

    Attributes:
        scores_TE: the scores of all experts, fp32.
        probabilities_TE: the weights of all experts, scaled to sum to 1, fp32.
        weights_TK: the weights of the chosen experts, fp32.
        chosen_TK: their numbers, int64.
    """

    scores_TE: torch.Tensor
    probabilities_TE: torch.Tensor
    weights_TK: torch.Tensor
    chosen_TK: torch.Tensor


class Router(nn.Module):
    """The linear layer that scores every expert for every token, in fp32, and the choice by these scores.

    Attributes:
        e_score_correction_bias: fp32 [E], added to the weights for the choice alone (arXiv 2408.15664); None without.
    """

    def __init__(self, name: str, experts: ExpertsSpec, place: Placement) -> None:
        super().__init__()
        self.rule = experts
        self.top_k, self.normalize = experts.top_k, experts.normalize
        self.weight = place.empty(f"{name}.weight")
        bias = f"{name}.e_score_correction_bias"
        self.e_score_correction_bias = place.untrained(bias) if bias in place.shapes else None

    def forward(self, x_TD: torch.Tensor) -> ExpertChoice:
        """Chooses experts for tokens [T, D]."""
        scores_TE = wide_linear(x_TD, self.weight)
        if self.rule.scoring == "softmax":
            probabilities_TE = scores_TE.softmax(dim=-1)
            return ExpertChoice(scores_TE, probabilities_TE, *self.choose(probabilities_TE))
        weights_TE = scores_TE.sigmoid()
        probabilities_TE = weights_TE / (weights_TE.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        return ExpertChoice(scores_TE, probabilities_TE, *self.choose(weights_TE))

    def choose(self, weights_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights and numbers of each token's experts, [T, K] both."""
        rule = self.rule
        if self.e_score_correction_bias is None and rule.num_groups == 1:
            weights_TK, chosen_TK = weights_TE.topk(self.top_k, dim=-1)
        else:
            chosen_TK = self._candidates(weights_TE.detach()).topk(self.top_k, dim=-1).indices
            weights_TK = weights_TE.gather(-1, chosen_TK)
        if self.normalize:
            least = 0.0 if rule.scoring == "softmax" else _LEAST_SUM
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + least)
        return weights_TK if rule.scale == 1 else weights_TK * rule.scale, chosen_TK

    def level(self, counts_E: torch.Tensor, rate: float) -> None:
        """Makes the bias of experts with fewer tokens than the mean larger by `rate`, that of those with more smaller.

        DeepSeek-V3, arXiv 2412.19437, section 2.1.2. Counts are whole numbers, so all ranks compute the same bits.

        Args:
            counts_E: fp64, how many tokens of the step's global batch each expert got.
            rate: the bias's change.
        """
        if self.e_score_correction_bias is not None:
            below_E = counts_E.sum() - counts_E * len(counts_E)
            with torch.no_grad():
                self.e_score_correction_bias.add_(below_E.sign().float(), alpha=rate)

    def _candidates(self, weights_TE: torch.Tensor) -> torch.Tensor:
        """Returns the numbers by which experts are chosen, [T, E]; -inf outside of a token's groups."""
        if self.e_score_correction_bias is not None:
            weights_TE = weights_TE + self.e_score_correction_bias
        if self.rule.num_groups == 1:
            return weights_TE
        grouped_TGE = weights_TE.unflatten(-1, (self.rule.num_groups, -1))
        best_TG = grouped_TGE.topk(2, dim=-1).values.sum(dim=-1).topk(self.rule.top_groups, dim=-1).indices
        outside_TG = torch.ones(grouped_TGE.shape[:-1], dtype=torch.bool, device=weights_TE.device)
        outside_TG.scatter_(-1, best_TG, False)
        inside_TGE: torch.Tensor = grouped_TGE.masked_fill(outside_TG.unsqueeze(-1), float("-inf"))
        return inside_TGE.flatten(-2)
