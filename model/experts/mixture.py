"""A mixture of experts (arXiv 1701.06538, 2401.04088), each of which is split over tensor-parallel ranks.

The router is replicated, so every rank sends the same tokens to the same experts; no token is dropped. Outputs and
gradients after `enter_block` are partial sums, the router's gradient too (`TensorSpec.partial_grad`). A shared expert
adds to the same partial sums.

Letters: T tokens, D hidden size, E experts, K of them per token, P pairs of a token and one of its experts.
"""

import torch
from torch import nn

from ...parallel.functions import enter_block, leave_block
from ..balance import RouterBalance, balancing_loss
from ..placement import Placement
from ..spec import ExpertsSpec
from .experts import Experts
from .router import ExpertChoice, Router
from .shared import LocalLinear, SharedExpert
from .token_pairs import TokenPairs


class MixtureOfExperts(nn.Module):
    """A feed-forward block in which each token passes its top K experts, weighted by their probabilities."""

    def __init__(self, layer: int, experts: ExpertsSpec, place: Placement) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.mlp"
        self.layer = layer
        self.num_sparse_layers = sum(isinstance(each.feed_forward, ExpertsSpec) for each in place.spec.layers)
        context = place.context
        self.tp, self.sequence_parallel = context.tp, context.sequence_parallel
        self.gate = Router(f"{prefix}.gate", experts, place)
        self.experts = Experts(f"{prefix}.experts", experts.num_experts, place)
        shared = f"{prefix}.shared_expert"
        is_gated = f"{shared}_gate.weight" in place.shapes
        self.shared_expert = SharedExpert(shared, place) if experts.shared else None
        self.shared_expert_gate = LocalLinear(f"{shared}_gate", place) if is_gated else None

    def forward(self, x_ND: torch.Tensor, balance: RouterBalance | None = None) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]; router and experts see all tokens, also of split hidden states.

        Args:
            x_ND: hidden states; [B, L, D] if `balance` is given.
            balance: the load-balancing loss to compute; None without one.
        """
        x_ND = enter_block(x_ND, self.tp, self.sequence_parallel)
        x_TD = x_ND.flatten(0, -2)
        choice: ExpertChoice = self.gate(x_TD)
        partial_TD = self._sum_of_experts(x_TD, choice)
        if self.shared_expert is not None:
            partial_TD = partial_TD + self.shared_expert(x_TD, self.shared_expert_gate)
        y_ND = leave_block(partial_TD.unflatten(0, x_ND.shape[:-1]), self.tp, self.sequence_parallel)
        if balance is None:
            return y_ND
        probabilities_BLE = choice.probabilities_TE.unflatten(0, x_ND.shape[:-1])
        chosen_BLK = choice.chosen_TK.unflatten(0, x_ND.shape[:-1])
        balance.on_routing(self.layer, chosen_BLK)
        loss = balancing_loss(probabilities_BLE, chosen_BLK, balance.counted_BL, balance.cp)
        return balance.attach(self.layer, y_ND, loss, self.num_sparse_layers, self.tp.size)

    def _sum_of_experts(self, x_TD: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """Returns the weighted sum of each token's experts."""
        chosen_TK, order_TK = choice.chosen_TK.sort(dim=-1)
        pairs = TokenPairs.by_expert(chosen_TK)
        counts_E = chosen_TK.flatten().bincount(minlength=self.experts.num_experts).tolist()
        y_PD = self.experts(pairs.spread(x_TD), counts_E)
        return pairs.weighted_sum(y_PD, choice.weights_TK.gather(-1, order_TK))
