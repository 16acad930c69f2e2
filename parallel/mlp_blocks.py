"""A feed-forward block in blocks of rows: its inner activations never exist for more than one of them.

They are as wide as the intermediate size and would be the most of what a long row keeps. Forward keeps the block's
input alone, and backward computes one block after the other again (tiled MLP of ALST, arXiv 2506.13996, section 3.1.2).
All ranks of a tensor-parallel group must have equally many rows, and so equally many collectives; no other ranks
communicate.

Letters: B any leading dims, L length (of this rank if hidden states are split along the sequence), R rows of a block,
D hidden size, I intermediate size of this rank, twice before SwiGLU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .collectives import all_gather_dim, all_reduce, reduce_scatter_dim
from .functions import SEQUENCE
from .layers import ColumnParallelLinear, RowParallelLinear
from .linear import Activation, activated, input_gradient, product, start_sum, weight_gradient
from .wide_sums import added, wide_dtype


@dataclass(frozen=True, slots=True)
class MLPBlocks:
    """A feed-forward block that is computed in blocks of rows.

    Attributes:
        up: the first product.
        down: the second one.
        activation: the function between them.
        num_rows: the positions of a sequence that a block has.
    """

    up: ColumnParallelLinear
    down: RowParallelLinear
    activation: Activation
    num_rows: int

    def __call__(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [..., L, D] to [..., L, D], replicated, or split along the sequence both times.

        The gradients of weights are computed in backward, also while others are deferred.
        """
        if torch.is_grad_enabled():
            params = (self.up.weight, self.up.bias, self.down.weight)
            y_BLD: torch.Tensor = _Blockwise.apply(x_BLD, *params, self)  # type: ignore[no-untyped-call]
        else:
            y_BLD = self.compute(x_BLD)
        return y_BLD if self.down.bias is None else y_BLD + self.down.bias

    def blocks(self, x_BLD: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the positions of each block, and their hidden states from all tensor-parallel ranks."""
        for start in range(0, x_BLD.shape[SEQUENCE], self.num_rows):
            rows = slice(start, start + self.num_rows)
            yield rows, self.gathered(x_BLD[..., rows, :])

    def gathered(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Returns hidden states of all tensor-parallel ranks, if they are split."""
        layer = self.up.product
        return all_gather_dim(x_BLD, SEQUENCE, layer.tp) if layer.sequence_parallel else x_BLD

    def inner(self, whole_BLD: torch.Tensor) -> torch.Tensor:
        """Maps hidden states of all ranks to the input of the activation [..., I]."""
        return product(whole_BLD, self.up.weight, self.up.product.num_transposed, self.up.bias)

    def compute(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Maps hidden states to those without the last bias, outside of autograd."""
        down, y_BLD = self.down.product, torch.empty_like(x_BLD, memory_format=torch.contiguous_format)
        for rows, whole_BLD in self.blocks(x_BLD):
            block_BLD = product(self.activation(self.inner(whole_BLD)), self.down.weight, down.num_transposed)
            if down.sequence_parallel:
                y_BLD[..., rows, :] = reduce_scatter_dim(block_BLD, SEQUENCE, down.tp)
            else:
                y_BLD[..., rows, :] = all_reduce(block_BLD, down.tp)
        return y_BLD


class _Blockwise(torch.autograd.Function):
    """The block as an autograd function of its input and of the parameters whose gradients it computes."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLD: torch.Tensor,
        up: torch.Tensor,
        up_bias: torch.Tensor | None,
        down: torch.Tensor,
        call: MLPBlocks,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_BLD)
        ctx.call = call
        return call.compute(x_BLD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_BLD,) = ctx.saved_tensors
        call: MLPBlocks = ctx.call
        sums = _Gradients(call, x_BLD, ctx.needs_input_grad)
        for rows, whole_BLD in call.blocks(x_BLD):
            sums.add(rows, whole_BLD, call.gathered(grads[0][..., rows, :]))
        dtype, totals = call.up.weight.dtype, (sums.up, sums.up_bias, sums.down)
        return sums.x_BLD, *(None if total is None else total.to(dtype) for total in totals), None


class _Gradients:
    """The gradients of a call, which blocks of rows add to.

    Args:
        call: the feed-forward block.
        x_BLD: the input of the whole block.
        needed: whether the input, the first weight, its bias and the second weight have a gradient.

    Attributes:
        x_BLD, up, up_bias, down: the gradients; None without one.
    """

    def __init__(self, call: MLPBlocks, x_BLD: torch.Tensor, needed: tuple[bool, ...]) -> None:
        self._call = call
        self._for_up, self._for_bias, self._for_down = needed[1:4]
        self.x_BLD = torch.empty_like(x_BLD, memory_format=torch.contiguous_format) if needed[0] else None
        self.up: torch.Tensor | None = None
        self.up_bias: torch.Tensor | None = None
        self.down: torch.Tensor | None = None

    def add(self, rows: slice, x_BRD: torch.Tensor, grad_BRD: torch.Tensor) -> None:
        """Adds a block's gradients.

        Args:
            rows: the positions of the block, of this rank's part.
            x_BRD: their hidden states from all tensor-parallel ranks.
            grad_BRD: the gradient of the block's output, from all ranks.
        """
        up, down = self._call.up, self._call.down
        before_BRI, after_BRI = activated(self._call.inner(x_BRD), self._call.activation)
        grad_BRI = input_gradient(grad_BRD, down.weight, down.product.num_transposed)
        if self._for_down:
            term = weight_gradient(grad_BRD, after_BRI.detach(), down.product.num_transposed)
            self.down = added(self.down, term)
        (grad_BRI,) = torch.autograd.grad(after_BRI, before_BRI, grad_BRI)
        # The sum over ranks runs under the products of the weight's gradient.
        partial_BRD = input_gradient(grad_BRI, up.weight, up.product.num_transposed) if self.x_BLD is not None else None
        pending = None if partial_BRD is None else start_sum(partial_BRD, up.product)
        if self._for_up:
            self.up = added(self.up, weight_gradient(grad_BRI, x_BRD, up.product.num_transposed))
        if self._for_bias:
            self.up_bias = added(self.up_bias, grad_BRI.flatten(0, -2).sum(0, dtype=wide_dtype(grad_BRI)))
        if self.x_BLD is not None and pending is not None:
            self.x_BLD[..., rows, :] = pending.wait()
