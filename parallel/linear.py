"""The product of a tensor-parallel linear layer with a backward of its own, which hides its communication.

The collective of the input's gradient is under way while the weight's gradient is computed (Megatron-LM, arXiv
2205.05198, section 4.2.2, which also gathers a split input again instead of keeping it whole); the latter can also be
put off, and an activation before the product be computed again. Where none of this is wanted, plain operators are as
good and remain: one rank, or no gradients.

Letters: N any leading dims, D in features, F out features of this rank. A weight is kept as [F, D], or as n blocks
[D, F / n], one below the other (`num_transposed` = n).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch

from .collectives import (
    PendingResult,
    all_gather_dim,
    all_reduce,
    reduce_scatter_dim,
    start_all_gather_dim,
    start_all_reduce,
    start_reduce_scatter_dim,
)
from .functions import SEQUENCE, enter_block, leave_block
from .mesh import Group
from .products import linear, matmul
from .weight_grads import WeightGradQueue

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ParallelProduct:
    """x_ND W_FD^T of one layer, with what goes before and after it.

    Attributes:
        side: "column" turns an input replicated (or split along the sequence) into features split over ranks, "row"
            features split over ranks into an output replicated (or split along the sequence).
        weight_grads: where weight gradients can be put off to.
    """

    side: Literal["column", "row"]
    tp: Group
    num_transposed: int = 0
    sequence_parallel: bool = False
    weight_grads: WeightGradQueue | None = None

    def __call__(
        self,
        x_ND: torch.Tensor,
        weight: torch.Tensor,
        bias_F: torch.Tensor | None = None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """[..., D] -> [..., F], plus the bias.

        Args:
            activation: what the input goes through first ("row" only), computed again by backward instead of kept.
        """
        queue = self.weight_grads if self.weight_grads and self.weight_grads.enabled else None
        if queue and not (weight.requires_grad and x_ND.requires_grad):
            queue = None
        if torch.is_grad_enabled() and (self.tp.size > 1 or queue or activation):
            call = _Call(self, weight, queue, activation)
            y_NF: torch.Tensor = _Product.apply(x_ND, None if queue else weight, call)  # type: ignore[no-untyped-call]
            return y_NF if bias_F is None else y_NF + bias_F
        if self.side == "column":
            return product(enter_block(x_ND, self.tp, self.sequence_parallel), weight, self.num_transposed, bias_F)
        x_ND = x_ND if activation is None else activation(x_ND)
        y_NF = leave_block(product(x_ND, weight, self.num_transposed), self.tp, self.sequence_parallel)
        return y_NF if bias_F is None else y_NF + bias_F

    def gathers(self, side: Literal["column", "row"]) -> bool:
        """Whether hidden states are gathered before the product of that side."""
        return self.sequence_parallel and self.side == side


@dataclass(frozen=True, slots=True)
class _Call:
    """One product on its way from forward to backward.

    Attributes:
        queue: where the weight's gradient will be put off to.
        activation: what the input goes through first, in backward again.
    """

    layer: ParallelProduct
    weight: torch.Tensor
    queue: WeightGradQueue | None
    activation: Activation | None


class _Product(torch.autograd.Function):
    """Without the bias, whose gradient is cheap.

    Backward of "column" turns a gradient split along features into that of a replicated (or split) input: its partial
    sums are summed (and scattered). That of "row" turns a replicated (or split, then gathered) gradient into one split
    along features. The weight's gradient is whole on each rank either way.

    Autograd does not see a weight whose gradient is put off: even without a gradient its hooks would be called.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight: torch.Tensor | None, call: _Call) -> torch.Tensor:
        ctx.save_for_backward(x_ND)
        ctx.call = call
        layer = call.layer
        if call.activation is not None:
            x_ND = call.activation(x_ND)
        if layer.gathers("column"):
            x_ND = all_gather_dim(x_ND, SEQUENCE, layer.tp)
        y_NF = product(x_ND, call.weight, layer.num_transposed)
        if layer.side == "column":
            return y_NF
        return reduce_scatter_dim(y_NF, SEQUENCE, layer.tp) if layer.sequence_parallel else all_reduce(y_NF, layer.tp)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (x_ND,) = ctx.saved_tensors
        call: _Call = ctx.call
        layer = call.layer
        for_input, for_weight, _ = ctx.needs_input_grad
        before_ND, after_ND = _activate(x_ND, call.activation)
        x_ND = after_ND.detach()
        grad_NF = all_gather_dim(grads[0], SEQUENCE, layer.tp) if layer.gathers("row") else grads[0]
        whole_ND = _start_gather(x_ND, layer) if for_weight else None
        sum_ND = _start_sum(_input_gradient(grad_NF, call.weight, layer.num_transposed), layer) if for_input else None
        grad_weight = _weight_gradient(grad_NF, whole_ND.wait(), layer.num_transposed) if whole_ND else None
        if call.queue is not None:
            call.queue.put(partial(_accumulate, call, grad_NF, x_ND))
        grad_ND = sum_ND.wait() if sum_ND else None
        if grad_ND is not None and after_ND is not before_ND:
            (grad_ND,) = torch.autograd.grad(after_ND, before_ND, grad_ND)
        return grad_ND, grad_weight, None


def _activate(x_ND: torch.Tensor, activation: Activation | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends of the activation's own piece of graph, the same tensor if there is none."""
    if activation is None:
        return x_ND, x_ND
    before_ND = x_ND.detach().requires_grad_()
    with torch.enable_grad():
        return before_ND, activation(before_ND)


def _start_gather(x_ND: torch.Tensor, layer: ParallelProduct) -> PendingResult:
    return start_all_gather_dim(x_ND, SEQUENCE, layer.tp) if layer.gathers("column") else PendingResult(x_ND)


def _start_sum(grad_ND: torch.Tensor, layer: ParallelProduct) -> PendingResult:
    """Partial gradients of a replicated or split input begin to be summed; those of split features are whole."""
    if layer.side == "row":
        return PendingResult(grad_ND)
    if layer.sequence_parallel:
        return start_reduce_scatter_dim(grad_ND, SEQUENCE, layer.tp)
    return start_all_reduce(grad_ND, layer.tp)


def _accumulate(call: _Call, grad_NF: torch.Tensor, x_ND: torch.Tensor) -> None:
    """What is put off: adds the gradient to the weight's as backward would, calling its hooks."""
    with torch.no_grad():
        whole_ND = _start_gather(x_ND, call.layer).wait()
        gradient = _weight_gradient(grad_NF, whole_ND, call.layer.num_transposed)
    torch.autograd.backward(call.weight, gradient)


def product(
    x_ND: torch.Tensor, weight: torch.Tensor, num_transposed: int, bias_F: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., D] -> [..., F], plus the bias, by this rank's weight."""
    if not num_transposed:
        return linear(x_ND, weight, bias_F)
    parts = [linear(x_ND, block.t()) for block in weight.chunk(num_transposed)]
    y_NF = parts[0] if num_transposed == 1 else torch.cat(parts, dim=-1)
    return y_NF if bias_F is None else y_NF + bias_F


def _input_gradient(grad_NF: torch.Tensor, weight: torch.Tensor, num_transposed: int) -> torch.Tensor:
    if not num_transposed:
        return matmul(grad_NF, weight)
    pairs = zip(grad_NF.chunk(num_transposed, dim=-1), weight.chunk(num_transposed), strict=True)
    terms = [matmul(part, block.t()) for part, block in pairs]
    return reduce(torch.add, reversed(terms))  # in the order, and so with the bits, of plain operators' backward


def _weight_gradient(grad_NF: torch.Tensor, x_ND: torch.Tensor, num_transposed: int) -> torch.Tensor:
    grad_TF, x_TD = grad_NF.flatten(0, -2), x_ND.flatten(0, -2)
    if not num_transposed:
        return matmul(grad_TF.t(), x_TD)
    parts = [matmul(x_TD.t(), part) for part in grad_TF.chunk(num_transposed, dim=-1)]
    return parts[0] if num_transposed == 1 else torch.cat(parts)
