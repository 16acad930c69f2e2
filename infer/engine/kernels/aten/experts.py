"""A mixture of experts on torch's operators (see `model/experts/mixture.py`, whose sums it repeats).

Letters: T tokens, D hidden size, E experts, K of them per token, P = T K pairs, S slices of the experts' inner size,
X = S D.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .....model.experts.token_pairs import TokenPairs
from .....parallel.collectives import tree_sum
from ...program.operations import Route
from .adapted_products import AdaptedRange, PreparedAdapter
from .expert_products import ExpertWeights, by_tiles, of_expert


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token.

    Attributes:
        weights_TK: the weights of the chosen experts, fp32.
        chosen_TK: their numbers, int64.
    """

    weights_TK: torch.Tensor
    chosen_TK: torch.Tensor


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns the sigmoid of every element, fp32, as a softmax with 0.

    The bits of torch's own depend on an element's place: at the end of a tensor it takes another exponential function.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]


def choose_experts(scores_TE: torch.Tensor, route: Route, bias_E: torch.Tensor | None = None) -> Routing:
    """Chooses the `top_k` best experts of every token, the lowest of equals first.

    Args:
        scores_TE: the scores of all experts, fp32.
        route: the rule of the choice.
        bias_E: what is added to weights for the choice; None without.
    """
    weights_TE = scores_TE.softmax(dim=-1) if route.scoring == "softmax" else sigmoid(scores_TE)
    chosen_TK = _best(_candidates(weights_TE, route, bias_E), route.top_k)
    weights_TK = weights_TE.gather(-1, chosen_TK)
    if route.normalize:
        least = 0.0 if route.scoring == "softmax" else 1e-20  # as transformers has it: all weights may be 0
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + least)
    return Routing(weights_TK * route.scale, chosen_TK)


def _candidates(weights_TE: torch.Tensor, route: Route, bias_E: torch.Tensor | None) -> torch.Tensor:
    """Returns the numbers by which experts are chosen, [T, E]; -inf outside of a token's groups."""
    numbers_TE = weights_TE if bias_E is None else weights_TE + bias_E
    if route.num_groups == 1:
        return numbers_TE
    grouped_TGE = numbers_TE.unflatten(-1, (route.num_groups, -1))
    groups = _best(grouped_TGE.topk(2, dim=-1).values.sum(dim=-1), route.top_groups)
    outside_TG = torch.ones(grouped_TGE.shape[:-1], dtype=torch.bool, device=weights_TE.device)
    outside_TG.scatter_(-1, groups, False)
    inside_TGE: torch.Tensor = grouped_TGE.masked_fill(outside_TG.unsqueeze(-1), float("-inf"))
    return inside_TGE.flatten(-2)


def _best(numbers_TN: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the places of the largest numbers of each row, [T, count], the lowest of equals first."""
    return numbers_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def run_experts(
    x_TD: torch.Tensor, routing: Routing, weights: ExpertWeights, adapted: Sequence[AdaptedRange] = ()
) -> torch.Tensor:
    """Maps tokens [T, D] to this rank's part of the weighted sums of their experts, [T, D].

    Args:
        x_TD: the tokens.
        routing: their experts.
        weights: the weights of all experts.
        adapted: the tokens with an adapter.
    """
    if x_TD.device.type == "cpu":
        return _sums_by_count(x_TD, routing, weights, adapted)
    found_TD = _sums_by_tile(x_TD, routing, weights)
    names = (weights.operation.gate_up, weights.operation.down)
    for each in adapted:
        if any(name in each.adapter.products for name in names):
            part = Routing(routing.weights_TK[each.rows], routing.chosen_TK[each.rows])
            found_TD[each.rows] = _sums_by_tile(x_TD[each.rows], part, weights, each.adapter)
    return found_TD


def _sums_by_count(
    x_TD: torch.Tensor, routing: Routing, weights: ExpertWeights, adapted: Sequence[AdaptedRange]
) -> torch.Tensor:
    """Returns the sums of experts' outputs, [T, D]: the host reads the number of each one's tokens."""
    num_experts, num_slices = weights.operation.num_experts, weights.operation.num_slices
    sums_TX = torch.zeros(len(x_TD), num_slices * x_TD.shape[1], device=x_TD.device)
    # Pairs (token, expert) sorted by expert, stably: each token's experts are added in ascending order.
    by_expert = routing.chosen_TK.flatten().argsort(stable=True)
    counts = routing.chosen_TK.flatten().bincount(minlength=num_experts).tolist()
    for expert, places in enumerate(by_expert.split(counts)):
        if len(places):
            tokens = places // routing.chosen_TK.shape[1]
            y_TX = of_expert(x_TD[tokens], expert, weights, _within(adapted, tokens)).float()
            sums_TX.index_add_(0, tokens, y_TX * routing.weights_TK.flatten()[places].unsqueeze(-1))
    return tree_sum(list(sums_TX.to(x_TD.dtype).chunk(num_slices, dim=-1)))


def _within(adapted: Sequence[AdaptedRange], tokens: torch.Tensor) -> list[AdaptedRange]:
    """Returns the places, among some ascending tokens, of those that have an adapter."""
    found = []
    for each in adapted:
        low, high = torch.searchsorted(tokens, tokens.new_tensor([each.rows.start, each.rows.stop])).tolist()
        if low < high:
            found.append(AdaptedRange(slice(low, high), each.adapter))
    return found


def _sums_by_tile(
    x_TD: torch.Tensor, routing: Routing, weights: ExpertWeights, adapter: PreparedAdapter | None = None
) -> torch.Tensor:
    """Returns the same sums, with an adapter beside all tokens; nothing waits for the device."""
    chosen_TK, order_TK = routing.chosen_TK.sort(dim=-1)
    pairs, ends_E = TokenPairs.by_expert(chosen_TK, weights.operation.num_experts)
    y_PX = by_tiles(x_TD[pairs.tokens_P], ends_E, weights, adapter)
    sums_TX = pairs.weighted_sum(y_PX, routing.weights_TK.gather(-1, order_TK))
    return tree_sum(list(sums_TX.chunk(weights.operation.num_slices, dim=-1)))
