"""Pairs of a token and one of its experts: tokens spread to their experts, and the weighted sums of the outputs.

Both sum in fp32 in one order of experts, and round once: forward adds a token's outputs in ascending order of experts,
backward its gradients in descending order. So neither depends on how tokens and experts are laid out over ranks.

Letters: T tokens, D hidden size, E experts, K of them per token, P = T K pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...parallel.row_blocks import row_blocks


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """The pairs of tokens and their experts, in the order in which the experts compute them.

    Attributes:
        tokens_P: int64, the token of each pair.
        places_TK: int64, the places of each token's pairs, in ascending order of experts.
    """

    tokens_P: torch.Tensor
    places_TK: torch.Tensor

    @staticmethod
    def by_expert(chosen_TK: torch.Tensor, num_experts: int) -> "tuple[TokenPairs, torch.Tensor]":
        """Returns the pairs sorted by expert and, for each expert, by token; and the end of each expert's, int32 [E].

        Args:
            chosen_TK: int64, the experts of each token in ascending order.
            num_experts: E.
        """
        experts_P, pairs_P = chosen_TK.flatten().sort(stable=True)
        experts_E = torch.arange(num_experts, device=experts_P.device)
        ends_E = torch.searchsorted(experts_P, experts_E, right=True, out_int32=True)  # bincount waits for the device
        places_P = torch.empty_like(pairs_P)
        places_P[pairs_P] = torch.arange(len(pairs_P), device=pairs_P.device)
        return TokenPairs(pairs_P // chosen_TK.shape[1], places_P.view_as(chosen_TK)), ends_E

    def arranged(self, order_P: torch.Tensor) -> "TokenPairs":
        """Returns the same pairs in another order, which has their present places."""
        places_P = torch.empty_like(order_P)
        places_P[order_P] = torch.arange(len(order_P), device=order_P.device)
        return TokenPairs(self.tokens_P[order_P], places_P[self.places_TK])

    def spread(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns the token of each pair, [P, D]."""
        return _CopyToPairs.apply(x_TD, self)  # type: ignore[no-any-return, no-untyped-call]

    def weighted_sum(self, y_PD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of each token's pairs, [T, D], rounded to the pairs' dtype.

        Args:
            y_PD: the experts' outputs.
            weights_TK: fp32, in ascending order of a token's experts.
        """
        return _WeightedSum.apply(y_PD, weights_TK, self)  # type: ignore[no-any-return, no-untyped-call]


class _CopyToPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, pairs: TokenPairs) -> torch.Tensor:
        ctx.pairs = pairs
        return x_TD[pairs.tokens_P]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad_PD,), places_TK = grads, ctx.pairs.places_TK
        grad_TD = grad_PD.new_empty(len(places_TK), grad_PD.shape[1])
        for rows in row_blocks(grad_TD):
            last, *others = places_TK[rows].flip(1).unbind(1)
            total = grad_PD[last].float()
            for places in others:
                total += grad_PD[places].float()
            grad_TD[rows] = total.to(grad_TD.dtype)
        return grad_TD, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: torch.Tensor, weights_TK: torch.Tensor, pairs: TokenPairs) -> torch.Tensor:
        ctx.save_for_backward(y_PD, weights_TK)
        ctx.pairs = pairs
        sums_TD = y_PD.new_empty(len(weights_TK), y_PD.shape[1])
        for rows in row_blocks(sums_TD):
            terms = zip(pairs.places_TK[rows].unbind(1), weights_TK[rows].split(1, 1), strict=True)
            total = torch.zeros(sums_TD[rows].shape, dtype=torch.float32, device=y_PD.device)
            for places, weights_T1 in terms:
                total += y_PD[places].float() * weights_T1
            sums_TD[rows] = total.to(sums_TD.dtype)
        return sums_TD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (y_PD, weights_TK), places_TK = ctx.saved_tensors, ctx.pairs.places_TK
        grad_PD, grad_TK = torch.empty_like(y_PD), torch.empty_like(weights_TK)
        for rows in row_blocks(grads[0]):
            grad_TD = grads[0][rows].float()
            for k, places in enumerate(places_TK[rows].unbind(1)):
                grad_PD[places] = (grad_TD * weights_TK[rows, k, None]).to(grad_PD.dtype)
                grad_TK[rows, k] = (grad_TD * y_PD[places].float()).sum(dim=-1)
        return grad_PD, grad_TK, None
