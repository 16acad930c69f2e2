"""A mixture of experts (arXiv 1701.06538, 2401.04088), each of which is split over tensor-parallel ranks.

The router is replicated, so every rank sends the same tokens to the same experts; no token is dropped. Outputs and
gradients after `enter_block` are partial sums, the router's gradient too (`TensorSpec.partial_grad`).

Letters: T tokens, D hidden size, I intermediate size of an expert on this rank, E experts, K of them per token,
S slices of I (see RowParallelLinear).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.collectives import all_gather, tree_sum
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
        self.in_features = place.spec.hidden_size
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
    """A feed-forward block in which each token passes its top K experts, weighted by their probabilities.

    If `Placement.row_tile` > 0, an expert multiplies that many rows at a time, padded, so that the bits of a token do
    not depend on the number of tokens (inference). 0 multiplies all of an expert's tokens at once.
    """

    def __init__(self, layer: int, experts: ExpertsSpec, place: Placement) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.mlp"
        self.layer = layer
        self.num_sparse_layers = sum(isinstance(each.feed_forward, ExpertsSpec) for each in place.spec.layers)
        context = place.context
        self.tp, self.sequence_parallel, self.row_tile = context.tp, context.sequence_parallel, place.row_tile
        self.num_local_slices = max(1, place.num_slices // context.tp.size)
        self.fixed_tree = place.num_slices > 1
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
        partial_STD = torch.zeros(self.num_local_slices, *x_TD.shape, dtype=torch.float32, device=x_TD.device)
        # Pairs (token, expert) sorted by expert, stably: each expert adds its tokens in their order on every layout.
        by_expert = chosen_TK.flatten().argsort(stable=True)
        counts = chosen_TK.flatten().bincount(minlength=self.experts.num_experts).tolist()
        for (gate_up, down), places in zip(self.experts(), by_expert.split(counts), strict=True):
            if len(places):
                tokens = places // self.top_k
                y_STD = self._expert(x_TD[tokens], gate_up, down).float() * weights_TK.flatten()[places].unsqueeze(-1)
                partial_STD.index_add_(1, tokens, y_STD)
        y_ND = self._sum(partial_STD.to(x_TD.dtype).unflatten(1, x_ND.shape[:-1]))
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

    def _expert(self, x_TD: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """Maps one expert's tokens [T, D] to partial outputs [S, T, D]."""
        size = self.row_tile or len(x_TD)
        padded_TD = F.pad(x_TD, (0, 0, 0, -len(x_TD) % size))
        downs = down.chunk(self.num_local_slices, dim=-1)
        tiles = []
        for tile_TD in padded_TD.split(size):
            inner = self.activation(linear(tile_TD, gate_up)).chunk(self.num_local_slices, dim=-1)
            tiles.append(torch.stack([linear(x, weight) for x, weight in zip(inner, downs, strict=True)]))
        return torch.cat(tiles, dim=1)[:, : len(x_TD)]

    def _sum(self, partial_SND: torch.Tensor) -> torch.Tensor:
        if not self.fixed_tree:
            return leave_block(partial_SND[0], self.tp, self.sequence_parallel)
        return tree_sum(all_gather(tree_sum(list(partial_SND.unbind())), self.tp))
