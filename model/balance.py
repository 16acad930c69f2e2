"""The losses of routers in a training forward pass: the load-balancing loss (Switch Transformers, arXiv 2101.03961,
section 2.2), and the z-loss, which keeps scores small (ST-MoE, arXiv 2202.08906, section 3.4).

Their gradients join backward at the output of each mixture of experts, so that neither recomputation nor pipeline
stages carry a second output. The trainer adds nothing to its loss, and reads their values after the forward pass.

Letters: B sequences, L length, E experts, K of them per token.
"""

from typing import Any

import torch

from ..parallel.collectives import all_reduce
from ..parallel.functions import leave_block
from ..parallel.mesh import ALONE, Group


class RouterBalance:
    """The losses of the routers of one stage in one micro-batch; an argument of `Decoder.forward`.

    The load-balancing loss of a sequence is E * sum over experts of (the share of the sequence's tokens that the expert
    gets * its mean probability), averaged over all mixture-of-experts layers of the model; perfectly balanced it is K.
    It is computed per sequence, so that it is a sum over the global batch on every layout. `transformers` computes it
    over a whole batch; for one layer and one sequence the two are equal.

    The z-loss of a token is the square of the log of the summed exponentials of its scores, averaged over the same
    layers.

    Args:
        weight: the factor of a sequence's loss in the training loss: `router_aux_loss_coef` / (sequences of the
            global batch), times the loss scale if there is one; 0 only measures the loss.
        counted_BL: bool, the tokens that count; None for all. A sequence without such tokens has loss 0.
        record_routing: whether to compute the checksum that `routing` returns, and the counts of tokens.
        places_BL: int64, the index of each token in its sequence; None if the sequences are whole.
        cp: the ranks that have the sequences' other tokens.
        z_weight: the factor of a token's z-loss in the training loss: `router_z_loss_coef` / (tokens of the global
            batch), times the loss scale if there is one; 0 leaves the z-loss out.
    """

    def __init__(
        self,
        weight: float,
        counted_BL: torch.Tensor | None = None,
        record_routing: bool = False,
        places_BL: torch.Tensor | None = None,
        cp: Group = ALONE,
        z_weight: float = 0.0,
    ) -> None:
        self.weight = weight
        self.z_weight = z_weight
        self.counted_BL = counted_BL
        self.record_routing = record_routing
        self.places_BL = places_BL
        self.cp = cp
        self._losses: dict[int, torch.Tensor] = {}  # these four by layer, since recomputation sets them again
        self._z_losses: dict[int, torch.Tensor] = {}
        self._routing: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}

    def on_routing(self, layer: int, chosen_BLK: torch.Tensor, num_experts: int) -> None:
        """Records the experts that a layer chose for its tokens, if routing is recorded."""
        if self.record_routing:
            self._routing[layer] = routing_checksum(layer, chosen_BLK, self.counted_BL, self.places_BL)
            self._chosen[layer] = _counts_of_experts(chosen_BLK, num_experts, self.counted_BL).sum(0)

    def attach(
        self, layer: int, y_ND: torch.Tensor, loss: torch.Tensor, num_layers: int, num_ranks: int
    ) -> torch.Tensor:
        """Returns `y_ND` unchanged, with a backward that also computes the gradient of `weight` * `loss`.

        Args:
            layer: its number in the whole model.
            y_ND: the output of its mixture of experts.
            loss: the result of `balancing_loss`, the same on all tensor-parallel ranks.
            num_layers: the number of mixture-of-experts layers in the whole model.
            num_ranks: the number of tensor-parallel ranks; the gradients of routers are summed over them, so each
                rank contributes an equal share.
        """
        self._losses[layer] = loss.detach().double() / num_layers / self.cp.size
        attached: torch.Tensor = _Attach.apply(y_ND, loss, self.weight / num_layers / num_ranks)  # type: ignore[no-untyped-call]
        return attached

    def attach_z(
        self, layer: int, y_ND: torch.Tensor, log_sums_BL: torch.Tensor, num_layers: int, num_ranks: int
    ) -> torch.Tensor:
        """Returns `y_ND` unchanged, with a backward that also computes the gradient of the tokens' z-losses.

        Args:
            log_sums_BL: fp32, the log of the summed exponentials of each token's scores.
            layer, y_ND, num_layers, num_ranks: see `attach`.
        """
        squares_BL = log_sums_BL.square()
        loss = (squares_BL if self.counted_BL is None else squares_BL * self.counted_BL).sum()
        self._z_losses[layer] = loss.detach().double() / num_layers
        attached: torch.Tensor = _Attach.apply(y_ND, loss, self.z_weight / num_layers / num_ranks)  # type: ignore[no-untyped-call]
        return attached

    def total(self) -> torch.Tensor | float:
        """Returns the load-balancing loss, summed over sequences and this stage's layers, an fp64 scalar.

        It is the same on all tensor-parallel ranks, and an equal share of it on each context-parallel one. Its sum over
        pipeline stages, data-parallel and context-parallel ranks, times `weight`, is its part of the training loss.
        """
        return sum(self._losses.values())

    def z_total(self) -> torch.Tensor | float:
        """Returns the z-loss, summed over this rank's tokens and this stage's layers, an fp64 scalar.

        It is summed over ranks like `total`, and `z_weight` is its factor.
        """
        return sum(self._z_losses.values())

    def add_counts(self, counts_LE: torch.Tensor) -> None:
        """Adds the number of counted tokens that each expert got to `counts_LE`, of all layers of the model."""
        for layer, counts_E in self._chosen.items():
            counts_LE[layer, : len(counts_E)] += counts_E

    def routing(self) -> torch.Tensor | float:
        """Returns a checksum of the recorded routing, an fp64 scalar, which is summed over ranks like `total`."""
        return sum(self._routing.values())


class _Attach(torch.autograd.Function):
    """The identity on `y_ND` and its gradient, replicated or split; `loss` gets a gradient, which is a partial sum."""

    @staticmethod
    def forward(ctx: Any, y_ND: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight, ctx.like = weight, (loss.dtype, loss.device)
        return y_ND.view_as(y_ND)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dtype, device = ctx.like
        return grads[0], torch.full((), ctx.weight, dtype=dtype, device=device), None


def balancing_loss(
    probabilities_BLE: torch.Tensor,
    chosen_BLK: torch.Tensor,
    counted_BL: torch.Tensor | None = None,
    cp: Group = ALONE,
) -> torch.Tensor:
    """Returns one layer's loss, summed over sequences, fp32.

    Its gradient is that of this rank's probabilities: over context-parallel ranks, sums come before their product.

    Args:
        probabilities_BLE: fp32, the probabilities of all experts.
        chosen_BLK: int64, the experts that were chosen for each token.
        counted_BL: bool, the tokens that count; None for all.
        cp: the ranks that have the sequences' other tokens.
    """
    num_experts = probabilities_BLE.shape[-1]
    counted_BL = chosen_BLK.new_ones(chosen_BLK.shape[:-1]) if counted_BL is None else counted_BL
    num_counted_B1 = counted_BL.sum(dim=-1, keepdim=True)
    sent_BE = _counts_of_experts(chosen_BLK, num_experts, counted_BL)
    sums_BE = leave_block((probabilities_BLE * counted_BL.unsqueeze(-1)).sum(dim=1), cp)
    if cp.size > 1:
        num_counted_B1, sent_BE = all_reduce(torch.cat((num_counted_B1, sent_BE), 1), cp).split((1, num_experts), 1)
    num_counted_B1 = num_counted_B1.clamp_min(1)
    return num_experts * ((sent_BE / num_counted_B1) * (sums_BE / num_counted_B1)).sum()


def _counts_of_experts(chosen_BLK: torch.Tensor, num_experts: int, counted_BL: torch.Tensor | None) -> torch.Tensor:
    """Returns how many counted tokens of each sequence chose each expert, int64 [B, E].

    They are counted in whole numbers, since a sum of many small shares would lose precision.
    """
    ones_BLK = (
        torch.ones_like(chosen_BLK) if counted_BL is None else counted_BL.long().unsqueeze(-1).expand_as(chosen_BLK)
    )
    counts_BE = chosen_BLK.new_zeros(len(chosen_BLK), num_experts)
    return counts_BE.scatter_add_(1, chosen_BLK.flatten(1), ones_BLK.flatten(1))


def routing_checksum(
    layer: int,
    chosen_BLK: torch.Tensor,
    counted_BL: torch.Tensor | None = None,
    places_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a checksum of the experts that a layer chose, a whole number as an fp64 scalar.

    It is the sum over tokens and their experts of a 20-bit hash of layer, position and expert. The sum is exact up to
    2^33 terms, and so the same on every layout.

    Args:
        layer: its number in the whole model.
        chosen_BLK: int64, the experts that were chosen for each token.
        counted_BL: bool, the tokens that count; None for all.
        places_BL: int64, the index of each token in its sequence; None if the sequences are whole.
    """
    places_BL = torch.arange(chosen_BLK.shape[1], device=chosen_BLK.device) if places_BL is None else places_BL
    mixed_BLK = (
        chosen_BLK * 0x9E3779B1 + places_BL.unsqueeze(-1) * 0x85EBCA77 + layer * 0xC2B2AE3D
    )  # odd constants of xxHash
    mixed_BLK = (mixed_BLK ^ (mixed_BLK >> 15)) * 0x27D4EB2F
    bits_BLK = (mixed_BLK ^ (mixed_BLK >> 13)) & 0xFFFFF
    if counted_BL is not None:
        bits_BLK = bits_BLK * counted_BL.unsqueeze(-1)
    return bits_BLK.sum().double()
