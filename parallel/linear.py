"""The matrix product of a tensor-parallel linear layer, with a backward that overlaps communication with computation.

The input's gradient is summed over ranks while the weight's gradient is computed, and a split input is gathered again
in backward instead of kept whole (Megatron-LM, arXiv 2205.05198, section 4.2.2). The weight's gradient can also be
deferred, and an activation before the product recomputed. Adapters of the weight multiply beside it (`adapters`). A
call that needs none of this (one rank, or no gradients) uses torch's plain operators, which are as fast.

Letters: N any leading dims, D in features, F out features of this rank. A weight is stored as [F, D], or as n blocks
[D, F / n], one below the other (`num_transposed` = n). A frozen weight may be in codes (`coded_weight`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch

from .adapters import AdapterProduct, adapted_input_gradient, adapted_product
from .coded_weight import CodedWeight
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
from .held_weight import Weight, coded_input_gradient, coded_product
from .mesh import Group
from .products import linear, matmul
from .weight_grads import WeightGradQueue

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ParallelProduct:
    """The product x_ND W_FD^T of one layer, with the collectives before and after it.

    Attributes:
        side: "column" maps an input that is replicated (or split along the sequence) to features split over ranks;
            "row" maps features split over ranks to an output that is replicated (or split along the sequence).
        tp: the tensor-parallel group.
        num_transposed: the number of transposed blocks of the weight; 0 if it is stored as [F, D].
        sequence_parallel: whether hidden states outside of the layer are split along the sequence.
        weight_grads: the queue that takes weight gradients while it is enabled.
    """

    side: Literal["column", "row"]
    tp: Group
    num_transposed: int = 0
    sequence_parallel: bool = False
    weight_grads: WeightGradQueue | None = None

    def __call__(
        self,
        x_ND: torch.Tensor,
        weight: Weight,
        bias_F: torch.Tensor | None = None,
        activation: Activation | None = None,
        adapter: AdapterProduct | None = None,
    ) -> torch.Tensor:
        """Maps [..., D] to [..., F] and adds the bias.

        Args:
            activation: a function that is applied to the input first ("row" only); backward computes it again.
            adapter: the adapters of the weight.
        """
        coded = isinstance(weight, CodedWeight)
        queue = self.weight_grads if self.weight_grads and self.weight_grads.enabled else None
        if queue and (isinstance(weight, CodedWeight) or not (weight.requires_grad and x_ND.requires_grad)):
            queue = None
        if torch.is_grad_enabled() and (self.tp.size > 1 or queue or activation or adapter or coded):
            call = _Call(self, weight, queue, activation, adapter)
            factors = adapter.tensors if adapter else ()
            y_NF: torch.Tensor = _Product.apply(x_ND, None if queue or coded else weight, call, *factors)  # type: ignore[no-untyped-call]
            return y_NF if bias_F is None else y_NF + bias_F
        if self.side == "column":
            x_ND = enter_block(x_ND, self.tp, self.sequence_parallel)
            if adapter is None:
                return product(x_ND, weight, self.num_transposed, bias_F)
            y_NF, _ = self.local(x_ND, weight, adapter)
        else:
            partial_NF, _ = self.local(x_ND if activation is None else activation(x_ND), weight, adapter)
            y_NF = leave_block(partial_NF, self.tp, self.sequence_parallel)
        return y_NF if bias_F is None else y_NF + bias_F

    def local(
        self, x_ND: torch.Tensor, weight: Weight, adapter: AdapterProduct | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns this rank's product with its adapters, [..., F], and their A x, None without any; no collectives."""
        if adapter is None:
            return product(x_ND, weight, self.num_transposed), None
        u_TR = adapter.down(x_ND)
        return adapted_product(x_ND, weight, self.num_transposed, adapter, u_TR), u_TR

    def gathers(self, side: Literal["column", "row"]) -> bool:
        """Returns whether the layer is of this side and gathers a split tensor there."""
        return self.sequence_parallel and self.side == side


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one product that forward keeps for backward.

    Attributes:
        layer: the product's layer.
        weight: this rank's part of the weight.
        queue: the queue that takes the weight's gradient, or None to compute it in backward.
        activation: a function that is applied to the input first, and again in backward.
        adapter: the adapters of the weight.
    """

    layer: ParallelProduct
    weight: Weight
    queue: WeightGradQueue | None
    activation: Activation | None
    adapter: AdapterProduct | None


class _Product(torch.autograd.Function):
    """The product as an autograd function; the bias, whose gradient is cheap, is added outside of it.

    Backward of "column" sums (or reduce-scatters) the partial gradients of the input. Backward of "row" all-gathers a
    split gradient first, and its result is split along features. Either way each rank computes the whole gradient of
    its part of the weight.

    A weight whose gradient is deferred is not an input of the function: autograd would call the weight's hooks even
    if backward returned no gradient for it. The factors of adapters are inputs after the call; their gradients are
    never deferred.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, weight: torch.Tensor | None, call: _Call, *factors: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        layer, given_ND = call.layer, x_ND
        if call.activation is not None:
            x_ND = call.activation(x_ND)
        if layer.gathers("column"):
            # Only the split input is saved below: keeping the gathered one would cost tp times the memory.
            x_ND = all_gather_dim(x_ND, SEQUENCE, layer.tp)
        y_NF, u_TR = layer.local(x_ND, call.weight, call.adapter)
        used_again = ctx.needs_input_grad[1] or call.queue or call.activation or call.adapter
        ctx.save_for_backward(given_ND if used_again else None, u_TR)
        if layer.side == "column":
            return y_NF
        return reduce_scatter_dim(y_NF, SEQUENCE, layer.tp) if layer.sequence_parallel else all_reduce(y_NF, layer.tp)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, u_TR = ctx.saved_tensors
        call: _Call = ctx.call
        layer, adapter = call.layer, call.adapter
        for_input, for_weight = ctx.needs_input_grad[:2]
        grad_NF = all_gather_dim(grads[0], SEQUENCE, layer.tp) if layer.gathers("row") else grads[0]
        if x_ND is None:
            return start_sum(_input_gradient(call, grad_NF, None), layer).wait() if for_input else None, None, None
        before_ND, after_ND = activated(x_ND, call.activation)
        x_ND = after_ND.detach()
        grad_TR = adapter.down_gradient(grad_NF) if adapter else None
        # The gather of the input runs under the input-gradient product, its sum under the weight-gradient product.
        whole_ND = _start_gather(x_ND, layer) if for_weight or adapter else None
        sum_ND = start_sum(_input_gradient(call, grad_NF, grad_TR), layer) if for_input else None
        grad_weight: torch.Tensor | None = None
        factors: tuple[torch.Tensor, ...] = ()
        if whole_ND:
            grad_weight, factors = _weight_gradients(call, for_weight, (grad_NF, grad_TR), (whole_ND.wait(), u_TR))
        if call.queue is not None:
            call.queue.put(partial(_accumulate, call, grad_NF, x_ND))
        grad_ND = sum_ND.wait() if sum_ND else None
        if grad_ND is not None and after_ND is not before_ND:
            (grad_ND,) = torch.autograd.grad(after_ND, before_ND, grad_ND)
        return grad_ND, grad_weight, None, *factors


def _weight_gradients(
    call: _Call,
    for_weight: bool,
    grads: tuple[torch.Tensor, torch.Tensor | None],
    inputs: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Returns the gradients of the weight, if it has one, and of the factors of adapters.

    Args:
        call: the product.
        for_weight: whether the weight has a gradient.
        grads: the gradients of output and A x, [..., F] and [T, R].
        inputs: the whole input and A x.
    """
    (grad_NF, grad_TR), (x_ND, u_TR) = grads, inputs
    weight = weight_gradient(grad_NF, x_ND, call.layer.num_transposed) if for_weight else None
    if call.adapter is None or grad_TR is None or u_TR is None:
        return weight, ()
    return weight, call.adapter.factor_gradients(grad_NF, grad_TR, x_ND, u_TR)


def _input_gradient(call: _Call, grad_NF: torch.Tensor, grad_TR: torch.Tensor | None) -> torch.Tensor:
    num_transposed = call.layer.num_transposed
    if call.adapter is None or grad_TR is None:
        return input_gradient(grad_NF, call.weight, num_transposed)
    return adapted_input_gradient(grad_NF, call.weight, num_transposed, call.adapter, grad_TR)


def activated(x_ND: torch.Tensor, activation: Activation | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input and the output of an activation, joined by a graph of their own; `x_ND` twice without one."""
    if activation is None:
        return x_ND, x_ND
    before_ND = x_ND.detach().requires_grad_()
    with torch.enable_grad():
        return before_ND, activation(before_ND)


def _start_gather(x_ND: torch.Tensor, layer: ParallelProduct) -> PendingResult:
    return start_all_gather_dim(x_ND, SEQUENCE, layer.tp) if layer.gathers("column") else PendingResult(x_ND)


def start_sum(grad_ND: torch.Tensor, layer: ParallelProduct) -> PendingResult:
    """Starts to sum the partial gradients of a "column" layer's input; the gradient of a "row" layer's is whole."""
    if layer.side == "row":
        return PendingResult(grad_ND)
    if layer.sequence_parallel:
        return start_reduce_scatter_dim(grad_ND, SEQUENCE, layer.tp)
    return start_all_reduce(grad_ND, layer.tp)


def _accumulate(call: _Call, grad_NF: torch.Tensor, x_ND: torch.Tensor) -> None:
    """Computes a deferred weight gradient and accumulates it as autograd would, with a call of the weight's hooks."""
    with torch.no_grad():
        whole_ND = _start_gather(x_ND, call.layer).wait()
        gradient = weight_gradient(grad_NF, whole_ND, call.layer.num_transposed)
    assert isinstance(call.weight, torch.Tensor)
    torch.autograd.backward(call.weight, gradient)


def product(
    x_ND: torch.Tensor, weight: Weight, num_transposed: int, bias_F: torch.Tensor | None = None
) -> torch.Tensor:
    """Maps [..., D] to [..., F] by this rank's weight and adds the bias."""
    if isinstance(weight, CodedWeight):
        y_NF = coded_product(x_ND, weight)
        return y_NF if bias_F is None else y_NF + bias_F
    if not num_transposed:
        return linear(x_ND, weight, bias_F)
    parts = [linear(x_ND, block.t()) for block in weight.chunk(num_transposed)]
    y_NF = parts[0] if num_transposed == 1 else torch.cat(parts, dim=-1)
    return y_NF if bias_F is None else y_NF + bias_F


def input_gradient(grad_NF: torch.Tensor, weight: Weight, num_transposed: int) -> torch.Tensor:
    """Maps the gradient [..., F] of `product` to that of its input [..., D], a partial sum if F is split over ranks."""
    if isinstance(weight, CodedWeight):
        return coded_input_gradient(grad_NF, weight)
    if not num_transposed:
        return matmul(grad_NF, weight)
    pairs = zip(grad_NF.chunk(num_transposed, dim=-1), weight.chunk(num_transposed), strict=True)
    terms = [matmul(part, block.t()) for part, block in pairs]
    return reduce(torch.add, reversed(terms))  # autograd's order for plain operators, so the bits are the same


def weight_gradient(grad_NF: torch.Tensor, x_ND: torch.Tensor, num_transposed: int) -> torch.Tensor:
    """Maps the gradient [..., F] and the input [..., D] of `product` to the gradient of this rank's weight."""
    grad_TF, x_TD = grad_NF.flatten(0, -2), x_ND.flatten(0, -2)
    if not num_transposed:
        return matmul(grad_TF.t(), x_TD)
    parts = [matmul(x_TD.t(), part) for part in grad_TF.chunk(num_transposed, dim=-1)]
    return parts[0] if num_transposed == 1 else torch.cat(parts)
