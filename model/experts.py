"""A mixture of experts (arXiv 1701.06538, 2401.04088), each of which is split over tensor-parallel ranks.

The router is replicated, so every rank sends the same tokens to the same experts; no token is dropped. Outputs and
gradients after `enter_block` are partial sums, the router's gradient too (`TensorSpec.partial_grad`).

Letters: T tokens, D hidden size, I intermediate size of an expert on this rank, E experts, K of them per token.
"""

from functools import partial

import torch
from torch import nn

from ..parallel.functions import enter_block, leave_block
from ..parallel.products import linear
from .activation import swiglu
from .balance import RouterBalance, balancing_loss
from .placement import Placement
from .recompute import recomputed
from .spec import ExpertsSpec


class Router(nn.Module):
    """The linear layer that scores every expert for every token."""

    def __init__(self, name: str, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(f"{name}.weight")

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Maps tokens [T, D] to scores [T, E]."""
        return linear(x_TD, self.weight)


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked along dim 0 in one parameter per kind."""

    def __init__(self, name: str, num_experts: int, place: Placement) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = place.empty(f"{name}.gate_up_proj")
        self.down_proj = place.empty(f"{name}.down_proj")

    def forward(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each expert's gate and up [2I, D] and down [D, I]."""
        stacked = (weight.unflatten(0, (self.num_experts, -1)) for weight in (self.gate_up_proj, self.down_proj))
        gate_ups, downs = (weight.unbind() for weight in stacked)
        return list(zip(gate_ups, downs, strict=True))


class MixtureOfExperts(nn.Module):
    """A feed-forward block in which each token passes its top K experts, weighted by their probabilities."""

    def __init__(self, layer: int, experts: ExpertsSpec, place: Placement) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.mlp"
        self.layer = layer
        self.num_sparse_layers = sum(isinstance(each.feed_forward, ExpertsSpec) for each in place.spec.layers)
        context = place.context
        self.tp, self.sequence_parallel = context.tp, context.sequence_parallel
        self.activation = partial(recomputed, swiglu) if place.recompute == "selective" else swiglu
        self.top_k, self.normalize = experts.top_k, experts.normalize
        self.gate = Router(f"{prefix}.gate", place)
        self.experts = Experts(f"{prefix}.experts", experts.num_experts, place)

    def forward(self, x_ND: torch.Tensor, balance: RouterBalance | None = None) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]; router and experts see all tokens, also of split hidden states.

        Args:
            x_ND: hidden states; [B, L, D] if `balance` is given.
            balance: the load-balancing loss to compute; None without one.
        """
        x_ND = enter_block(x_ND, self.tp, self.sequence_parallel)
        x_TD = x_ND.flatten(0, -2)
        probabilities_TE = self.gate(x_TD).float().softmax(dim=-1)
        weights_TK, chosen_TK = self._choose(probabilities_TE)
        partial_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        # Pairs (token, expert) sorted by expert, stably: each expert adds its tokens in their order on every layout.
        by_expert = chosen_TK.flatten().argsort(stable=True)
        counts = chosen_TK.flatten().bincount(minlength=self.experts.num_experts).tolist()
        for (gate_up, down), places in zip(self.experts(), by_expert.split(counts), strict=True):
            if len(places):
                tokens = places // self.top_k
                y_TD = linear(self.activation(linear(x_TD[tokens], gate_up)), down)
                partial_TD.index_add_(0, tokens, y_TD.float() * weights_TK.flatten()[places].unsqueeze(-1))
        y_ND = leave_block(partial_TD.to(x_TD.dtype).unflatten(0, x_ND.shape[:-1]), self.tp, self.sequence_parallel)
        if balance is None:
            return y_ND
        probabilities_BLE, chosen_BLK = (x.unflatten(0, x_ND.shape[:-1]) for x in (probabilities_TE, chosen_TK))
        balance.on_routing(self.layer, chosen_BLK)
        loss = balancing_loss(probabilities_BLE, chosen_BLK, balance.counted_BL)
        return balance.attach(self.layer, y_ND, loss, self.num_sparse_layers, self.tp.size)

    def _choose(self, probabilities_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TK, chosen_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK, chosen_TK
