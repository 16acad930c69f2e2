"""A mixture of experts on torch's operators (see `model/experts/mixture.py`, whose sums it repeats).

An expert multiplies a fixed number of rows at a time, padded, so that a token's bits do not depend on the others.
Letters: T tokens, D hidden size, I intermediate size of an expert on this rank, E experts, K of them per token,
S slices of I.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from .....model.activation import swiglu
from .....parallel.coded_weight import CodedWeight
from .....parallel.collectives import tree_sum
from .....parallel.products import linear
from ...program.operations import Route, RunExperts
from .adapted_products import AdaptedRange, add_of_expert
from .row_tiles import SMALLEST

ExpertRows: TypeAlias = torch.Tensor | CodedWeight  # the weights of all experts, one below the other


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
    x_TD: torch.Tensor,
    routing: Routing,
    gate_up: ExpertRows,
    down: ExpertRows,
    operation: RunExperts,
    adapted: Sequence[AdaptedRange] = (),
) -> torch.Tensor:
    """Maps tokens [T, D] to this rank's part of the weighted sums of their experts, [T, D].

    Args:
        x_TD: the tokens.
        routing: their experts.
        gate_up, down: the weights of all experts, one below the other: [E * 2I, D] and [E * D, I].
        operation: their sizes.
        adapted: the tokens with an adapter.
    """
    num_experts, num_slices = operation.num_experts, operation.num_slices
    top_k = routing.chosen_TK.shape[1]
    sums_STD = torch.zeros(num_slices, *x_TD.shape, dtype=torch.float32, device=x_TD.device)
    # Pairs (token, expert) sorted by expert, stably: each token's experts are added in ascending order.
    by_expert = routing.chosen_TK.flatten().argsort(stable=True)
    counts = routing.chosen_TK.flatten().bincount(minlength=num_experts).tolist()
    inner, hidden = 2 * operation.inner, x_TD.shape[-1]
    for expert, places in enumerate(by_expert.split(counts)):
        if len(places):
            tokens = places // top_k
            gate_up_FD = gate_up[slice(expert * inner, (expert + 1) * inner)]
            down_DI = down[slice(expert * hidden, (expert + 1) * hidden)]
            own = _AdaptersOfExpert(operation, expert, _within(adapted, tokens))
            y_STD = _expert(x_TD[tokens], gate_up_FD, down_DI.chunk(num_slices, dim=-1), own).float()
            sums_STD.index_add_(1, tokens, y_STD * routing.weights_TK.flatten()[places].unsqueeze(-1))
    return tree_sum(list(sums_STD.to(x_TD.dtype).unbind()))


@dataclass(frozen=True, slots=True)
class _AdaptersOfExpert:
    """The adapters of one expert, and the rows among its own that have one."""

    operation: RunExperts
    expert: int
    ranges: Sequence[AdaptedRange]


def _within(adapted: Sequence[AdaptedRange], tokens: torch.Tensor) -> list[AdaptedRange]:
    """Returns the places, among some ascending tokens, of those that have an adapter."""
    found = []
    for each in adapted:
        low, high = torch.searchsorted(tokens, tokens.new_tensor([each.rows.start, each.rows.stop])).tolist()
        if low < high:
            found.append(AdaptedRange(slice(low, high), each.adapter))
    return found


def _expert(
    x_TD: torch.Tensor, gate_up_FD: torch.Tensor, down_slices: tuple[torch.Tensor, ...], own: _AdaptersOfExpert
) -> torch.Tensor:
    """Maps one expert's tokens [T, D] to the sums of each slice, [S, T, D]."""
    tiles = F.pad(x_TD, (0, 0, 0, -len(x_TD) % SMALLEST)).split(SMALLEST)
    inner_TF = torch.cat([linear(tile_TD, gate_up_FD) for tile_TD in tiles])
    add_of_expert(own.operation.gate_up, own.expert, [inner_TF], x_TD, [gate_up_FD], own.ranges)
    gated_TI = torch.cat([swiglu(tile_TF) for tile_TF in inner_TF.split(SMALLEST)])
    slices = zip(gated_TI.chunk(len(down_slices), dim=-1), down_slices, strict=True)
    sums = [torch.cat([linear(x, weight) for x in part.split(SMALLEST)]) for part, weight in slices]
    add_of_expert(own.operation.down, own.expert, sums, gated_TI, down_slices, own.ranges)
    return torch.stack(sums)[:, : len(x_TD)]
