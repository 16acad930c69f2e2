"""The load-balancing loss of routers (Switch Transformers, arXiv 2101.03961, section 2.2) in a training forward pass.

Its gradient enters backward by itself where hidden states leave a layer, so that neither recomputation nor pipeline
stages carry a second output: whoever trains adds nothing to the loss, and reads the value off afterwards.

Letters: B sequences, L length, E experts, K of them per token.
"""

from typing import Any

import torch


class RouterBalance:
    """Handed to `Decoder.forward` of one micro-batch; collects what its routers' loss is, over the stage's own layers.

    The loss of a sequence is the mean over all mixture-of-experts layers of the model of E * sum over experts of
    (share of the sequence's tokens sent there, times mean probability there); perfectly balanced it is K. It is taken
    per sequence, unlike in `transformers`, which it equals for one layer and one sequence: so it is a sum over the
    global batch, whatever the layout.

    Args:
        weight: what a unit of the loss of a sequence counts in what backward differentiates: `router_aux_loss_coef` /
            (sequences of the global batch), times the scale of the loss where it is scaled. 0 = measured only.
        counted_BL: bool, the tokens that count; None = all. A sequence without any has loss 0.
        watch: also take down where tokens are sent, see `routing`.
    """

    def __init__(self, weight: float, counted_BL: torch.Tensor | None = None, watch: bool = False) -> None:
        self.weight = weight
        self.counted_BL = counted_BL
        self.watch = watch
        self._losses: dict[int, torch.Tensor] = {}
        self._routing: dict[int, torch.Tensor] = {}

    def take_down(self, layer: int, chosen_BLK: torch.Tensor) -> None:
        """Is told by a layer which experts tokens are sent to."""
        if self.watch:
            self._routing[layer] = routing_checksum(layer, chosen_BLK, self.counted_BL)

    def attach(
        self, layer: int, y_ND: torch.Tensor, loss: torch.Tensor, num_layers: int, num_ranks: int
    ) -> torch.Tensor:
        """Returns `y_ND`, the output of a mixture of experts, whose backward also sends `weight` back through `loss`.

        Args:
            loss: from `balancing_loss`, the same on all tensor-parallel ranks.
            num_layers: mixture-of-experts layers of the whole model.
            num_ranks: tensor-parallel ranks, over which gradients of routers are summed: each contributes its share.
        """
        self._losses[layer] = loss.detach().double() / num_layers  # by layer: recomputation comes here twice
        attached: torch.Tensor = _Attach.apply(y_ND, loss, self.weight / num_layers / num_ranks)  # type: ignore[no-untyped-call]
        return attached

    def total(self) -> torch.Tensor | float:
        """The loss summed over sequences, an fp64 scalar without gradient, the same on all tensor-parallel ranks; over
        pipeline stages and data-parallel ranks it adds up. `weight` times it is the share of the training loss."""
        return sum(self._losses.values())

    def routing(self) -> torch.Tensor | float:
        """With `watch`, a checksum of where tokens are sent, an fp64 scalar; it adds up as `total` does."""
        return sum(self._routing.values())


class _Attach(torch.autograd.Function):
    """Leaves `y_ND` and its gradient as they are, replicated or split; the loss's gradient is a partial one."""

    @staticmethod
    def forward(ctx: Any, y_ND: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight, ctx.like = weight, (loss.dtype, loss.device)
        return y_ND.view_as(y_ND)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dtype, device = ctx.like
        return grads[0], torch.full((), ctx.weight, dtype=dtype, device=device), None


def balancing_loss(
    probabilities_BLE: torch.Tensor, chosen_BLK: torch.Tensor, counted_BL: torch.Tensor | None = None
) -> torch.Tensor:
    """One layer's loss, summed over sequences, fp32.

    Args:
        probabilities_BLE: fp32, of all experts.
        chosen_BLK: int64, the experts that tokens were sent to.
        counted_BL: as in RouterBalance.
    """
    num_experts = probabilities_BLE.shape[-1]
    counted_BL = chosen_BLK.new_ones(chosen_BLK.shape[:-1]) if counted_BL is None else counted_BL
    counted_BL = counted_BL.long()
    num_counted_B1 = counted_BL.sum(dim=-1, keepdim=True).clamp_min(1)
    sent_BE = chosen_BLK.new_zeros(len(chosen_BLK), num_experts).scatter_add_(
        1, chosen_BLK.flatten(1), counted_BL.repeat_interleave(chosen_BLK.shape[-1], dim=-1)
    )  # whole numbers: a sum of many small shares would drift
    sums_BE = (probabilities_BLE * counted_BL.unsqueeze(-1)).sum(dim=1)
    return num_experts * ((sent_BE / num_counted_B1) * (sums_BE / num_counted_B1)).sum()


def routing_checksum(layer: int, chosen_BLK: torch.Tensor, counted_BL: torch.Tensor | None = None) -> torch.Tensor:
    """An fp64 scalar, a whole number, that is another one (but for rare chance) where a token is sent elsewhere.

    It is a sum over tokens and their experts of 20 bits mixed from layer, position and expert: exact, and so the same
    however sequences and layers are dealt out, up to 2^33 of them.
    """
    positions_L1 = torch.arange(chosen_BLK.shape[1], device=chosen_BLK.device).unsqueeze(-1)
    mixed_BLK = chosen_BLK * 0x9E3779B1 + positions_L1 * 0x85EBCA77 + layer * 0xC2B2AE3D  # odd constants of xxHash
    mixed_BLK = (mixed_BLK ^ (mixed_BLK >> 15)) * 0x27D4EB2F
    bits_BLK = (mixed_BLK ^ (mixed_BLK >> 13)) & 0xFFFFF
    if counted_BL is not None:
        bits_BLK = bits_BLK * counted_BL.unsqueeze(-1)
    return bits_BLK.sum().double()
