"""A mixture of experts (arXiv 1701.06538, 2401.04088) over ranks; see `spreads` for the ways of its tokens.

The router is replicated, and no token is dropped. The router's gradient is a partial sum over the tensor-parallel ranks
(`TensorSpec.partial_grad`): each has computed a part of every token's experts, or all of them for a part of the tokens.
A shared expert is always split over these ranks, as a dense block is.

Letters: T tokens, D hidden size, E experts, K of them per token.
"""

from functools import partial

import torch
from torch import nn

from ...parallel.functions import enter_block, leave_block
from ...parallel.token_noise import TokenNoise
from ..balance import RouterBalance, balancing_loss
from ..placement import Placement
from ..spec import ExpertsSpec
from .experts import Experts
from .router import ExpertChoice, Router
from .shared import LocalLinear, SharedExpert
from .spreads import spread_of


class MixtureOfExperts(nn.Module):
    """A feed-forward block in which each token passes its top K experts, weighted by their probabilities."""

    def __init__(self, layer: int, experts: ExpertsSpec, place: Placement) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.mlp"
        self.layer = layer
        self.num_sparse_layers = sum(isinstance(each.feed_forward, ExpertsSpec) for each in place.spec.layers)
        self.tp, self.sequence_parallel = place.context.tp, place.context.sequence_parallel
        self.spread = spread_of(place)
        self.gate = Router(f"{prefix}.gate", experts, place)
        self.experts = Experts(f"{prefix}.experts", place)
        shared = f"{prefix}.shared_expert"
        is_gated = f"{shared}_gate.weight" in place.shapes
        self.shared_expert = SharedExpert(shared, place) if experts.shared else None
        self.shared_expert_gate = LocalLinear(f"{shared}_gate", place) if is_gated else None

    def forward(
        self, x_ND: torch.Tensor, balance: RouterBalance | None = None, noise: TokenNoise | None = None
    ) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]; router and experts see all tokens, also of split hidden states.

        Args:
            x_ND: hidden states; [B, L, D] if `balance` is given.
            balance: the losses of routers to compute; None without any.
            noise: the random numbers of all tokens, for dropout of adapters of the shared expert.
        """
        length = x_ND.shape[-2] * (self.tp.size if self.sequence_parallel else 1)
        given_ND, x_ND = x_ND, self.spread.enter(x_ND)
        x_TD, shape = x_ND.flatten(0, -2), x_ND.shape[:-1]
        choice: ExpertChoice = self.gate(x_TD)
        sums_TD, shared = self.spread.sums(x_TD, choice, self.experts, partial(self._shared, given_ND, x_TD, noise))
        if shared is not None and self.spread.is_split:
            sums_TD = sums_TD + shared
        y_ND = self.spread.leave(sums_TD.unflatten(0, shape), length)
        if shared is not None and not self.spread.is_split:
            y_ND = y_ND + shared
        if balance is None:
            return y_ND
        probabilities_BLE = self.spread.whole(choice.probabilities_TE.unflatten(0, shape), length)
        chosen_BLK = self.spread.whole(choice.chosen_TK.unflatten(0, shape), length)
        balance.on_routing(self.layer, chosen_BLK, probabilities_BLE.shape[-1])
        loss = balancing_loss(probabilities_BLE, chosen_BLK, balance.counted_BL, balance.cp)
        y_ND = balance.attach(self.layer, y_ND, loss, self.num_sparse_layers, self.spread.num_shares)
        if not balance.z_weight:
            return y_ND
        log_sums_T1 = choice.scores_TE.logsumexp(dim=-1, keepdim=True)
        log_sums_BL = self.spread.whole(log_sums_T1.unflatten(0, shape), length).squeeze(-1)
        return balance.attach_z(self.layer, y_ND, log_sums_BL, self.num_sparse_layers, self.spread.num_shares)

    def _shared(self, x_ND: torch.Tensor, entered_TD: torch.Tensor, noise: TokenNoise | None) -> torch.Tensor | None:
        """Returns the output of the shared expert, None without one.

        It is a part of the sums of split experts. With others its tokens come and go apart from theirs.
        """
        if self.shared_expert is None:
            return None
        if self.spread.is_split:
            return self.shared_expert(entered_TD, self.shared_expert_gate, noise)  # type: ignore[no-any-return]
        x_ND = enter_block(x_ND, self.tp, self.sequence_parallel)
        y_TD = self.shared_expert(x_ND.flatten(0, -2), self.shared_expert_gate, noise)
        return leave_block(y_TD.unflatten(0, x_ND.shape[:-1]), self.tp, self.sequence_parallel)
