"""The cross entropy of a head's logits in blocks of rows: no tensor of tokens x vocabulary is ever made.

A block's logits become their own gradient in place as soon as its losses are known, and the gradients of the hidden
states and of the weight are summed from block to block. So forward computes the gradients too, where its backward comes
next. Where other passes lie between the two, backward computes the logits again instead: the gradient of a head's
weight is large, and one would wait in each of these passes.

Letters: B sequences, L length (l of this rank if hidden states are split along the sequence), N = B L tokens, R rows of
a block, D hidden size, V padded vocabulary rows of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ..core.labels import IGNORED
from .collectives import all_gather_dim, all_reduce, all_reduce_max, reduce_scatter_dim
from .functions import SEQUENCE
from .linear import ParallelProduct
from .logits_blocks import logits_blocks
from .products import linear, matmul
from .row_blocks import row_blocks
from .weight_grads import WeightGradQueue


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """The arguments of a head's loss.

    Attributes:
        targets_BL: int64 ids below `vocab_size`, or IGNORED, whose loss is 0; the same on every tensor-parallel rank.
        vocab_size: the number of real ids; rows of the weight beyond it are padding and do not count.
        factor: the factor of the summed loss.
        backward_follows: whether backward is the next pass, so that forward may keep gradients for it.
    """

    targets_BL: torch.Tensor
    vocab_size: int
    factor: float = 1.0
    backward_follows: bool = True


class RowStatistics(NamedTuple):
    """The numbers of rows of logits of which gradients are made.

    Attributes:
        top_R, total_R: the maximum of each row over all ranks, and the sum of exp(logits - maximum), fp32.
        index_R1, here_R: the column of the target on this rank, and whether it is one of its own.
        scale_R1: the factor of the row's loss, fp32.
    """

    top_R: torch.Tensor
    total_R: torch.Tensor
    index_R1: torch.Tensor
    here_R: torch.Tensor
    scale_R1: torch.Tensor


def exponential_sums(logits_RV: torch.Tensor, top_R: torch.Tensor) -> torch.Tensor:
    """Returns the sum of exp(logits - top) of each row, fp32."""
    total_R = torch.empty_like(top_R)
    for rows in row_blocks(logits_RV):
        total_R[rows] = _exponentials(logits_RV[rows], top_R[rows]).sum(dim=-1)
    return total_R


def overwrite_by_gradient(logits_RV: torch.Tensor, rows_of: RowStatistics) -> None:
    """Writes the gradient of the loss of each row in the place of its logits."""
    for rows in row_blocks(logits_RV) if logits_RV.shape[-1] else ():
        block_RV = _exponentials(logits_RV[rows], rows_of.top_R[rows]).div_(rows_of.total_R[rows].unsqueeze(-1))
        index_R1, here_R1 = rows_of.index_R1[rows], rows_of.here_R[rows].unsqueeze(-1)
        if torch.compiler.is_compiling():  # a scatter would be a kernel of its own, for which the block goes to memory
            columns_V = torch.arange(block_RV.shape[-1], device=block_RV.device)
            block_RV = block_RV - ((columns_V == index_R1) & here_R1).float()
        else:
            block_RV.scatter_add_(-1, index_R1, -here_R1.float())
        logits_RV[rows] = block_RV.mul_(rows_of.scale_R1[rows])


@dataclass(frozen=True, slots=True)
class LossSteps:
    """The steps of a block's loss that read all its logits, which may be compiled."""

    exponential_sums: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = exponential_sums
    overwrite_by_gradient: Callable[[torch.Tensor, RowStatistics], None] = overwrite_by_gradient


PLAIN: Final = LossSteps()


def head_loss(
    x_BLD: torch.Tensor, weight_VD: torch.Tensor, head: ParallelProduct, loss: HeadLoss, steps: LossSteps = PLAIN
) -> torch.Tensor:
    """Returns the sum of -log softmax(x W^T)[target] over valid targets, times the factor.

    Args:
        x_BLD: hidden states, replicated over `head.tp`, or this rank's part [B, l, D] of sequences that are split.
        weight_VD: this rank's rows of the weight, of the hidden states' dtype.
        head: the column-parallel product whose output would be the logits.
        loss: the targets, and how they count.
        steps: the steps of each block.

    Returns:
        An fp64 scalar, the same on every tensor-parallel rank.
    """
    call = _HeadCall(head, weight_VD, loss, steps)
    if not torch.is_grad_enabled() or not (x_BLD.requires_grad or weight_VD.requires_grad):
        return _run(call, _gathered(x_BLD, head), None)
    queue = head.weight_grads if head.weight_grads and head.weight_grads.enabled else None
    if queue and not (weight_VD.requires_grad and x_BLD.requires_grad):
        queue = None
    # A weight whose gradient is deferred is no input: autograd would call its hooks even without a gradient.
    return _BlockwiseLoss.apply(x_BLD, None if queue else weight_VD, call, queue)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _HeadCall:
    head: ParallelProduct
    weight_VD: torch.Tensor
    loss: HeadLoss
    steps: LossSteps


class _BlockwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BLD: torch.Tensor, weight_VD: torch.Tensor | None, call: _HeadCall, queue: WeightGradQueue | None
    ) -> torch.Tensor:
        ctx.call, ctx.queue = call, queue
        whole_BLD = _gathered(x_BLD, call.head)
        if not call.loss.backward_follows:
            ctx.save_for_backward(x_BLD)
            return _run(call, whole_BLD, None)
        sums = _HeadGradients(call.weight_VD, whole_BLD, x_BLD.requires_grad)
        total = _run(call, whole_BLD, sums)
        ctx.save_for_backward(sums.of_input(call.head), sums.weight_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        call: _HeadCall = ctx.call
        if call.loss.backward_follows:
            grad_BLD, grad_VD = ctx.saved_tensors
        else:
            (x_BLD,) = ctx.saved_tensors
            whole_BLD = _gathered(x_BLD, call.head)
            sums = _HeadGradients(call.weight_VD, whole_BLD, ctx.needs_input_grad[0])
            _run(call, whole_BLD, sums)
            grad_BLD, grad_VD = sums.of_input(call.head), sums.weight_VD
        grad_BLD, grad_VD = _times(grad_BLD, grads[0]), _times(grad_VD, grads[0])
        if ctx.queue is not None:
            ctx.queue.put(partial(torch.autograd.backward, call.weight_VD, grad_VD))
            grad_VD = None
        return grad_BLD, grad_VD, None, None


class _HeadGradients:
    """The gradients of hidden states and weight, which blocks of rows add to.

    Args:
        weight_VD: the weight; its gradient is summed only if it has one.
        whole_BLD: the hidden states of whole sequences.
        for_input: whether hidden states have a gradient.

    Attributes:
        weight_VD: the gradient of the weight, in its dtype once all blocks are added; None without one.
    """

    def __init__(self, weight_VD: torch.Tensor, whole_BLD: torch.Tensor, for_input: bool) -> None:
        self._weight_VD = weight_VD
        self._x_BLD = torch.empty_like(whole_BLD, memory_format=torch.contiguous_format) if for_input else None
        self.weight_VD: torch.Tensor | None = None

    def add(self, x_ND: torch.Tensor, rows: slice, grad_RV: torch.Tensor) -> None:
        """Adds the gradient of a block's logits, whose rows come in order."""
        if self._x_BLD is not None:
            self._x_BLD.view_as(x_ND)[rows] = matmul(grad_RV, self._weight_VD)
        if not self._weight_VD.requires_grad:
            return
        if self.weight_VD is None:
            self.weight_VD = matmul(grad_RV.t(), x_ND[rows])
        elif self.weight_VD.dtype == grad_RV.dtype == torch.float32:
            self.weight_VD.addmm_(grad_RV.t(), x_ND[rows])
        else:  # in low precision a sum of many blocks would stop growing
            self.weight_VD = self.weight_VD.float().add_(matmul(grad_RV.t(), x_ND[rows]))

    def of_input(self, head: ParallelProduct) -> torch.Tensor | None:
        """Returns the gradient of hidden states, summed over tensor-parallel ranks; None without one."""
        if self._x_BLD is None or not head.sequence_parallel:
            return None if self._x_BLD is None else all_reduce(self._x_BLD, head.tp)
        return reduce_scatter_dim(self._x_BLD, SEQUENCE, head.tp)

    def finish(self) -> None:
        """Called after the last block."""
        if self.weight_VD is not None:
            self.weight_VD = self.weight_VD.to(self._weight_VD.dtype)


def _run(call: _HeadCall, whole_BLD: torch.Tensor, gradients: _HeadGradients | None) -> torch.Tensor:
    """Returns the loss, block by block, and adds the gradients if they are wanted."""
    loss, weight_VD = call.loss, call.weight_VD
    x_ND, targets_N = whole_BLD.flatten(0, -2), loss.targets_BL.flatten()
    total = torch.zeros((), dtype=torch.float64, device=x_ND.device)
    for rows in logits_blocks(len(x_ND), len(weight_VD)):
        total += _run_block(call, x_ND, targets_N, rows, gradients)
    if gradients is not None:
        gradients.finish()
    return total * loss.factor


def _run_block(
    call: _HeadCall, x_ND: torch.Tensor, targets_N: torch.Tensor, rows: slice, gradients: _HeadGradients | None
) -> torch.Tensor:
    """Returns the sum of a block's losses; its logits end with the call, before those of the next block are made."""
    loss = call.loss
    block = _Block(linear(x_ND[rows], call.weight_VD), targets_N[rows], call)
    if gradients is not None:
        gradients.add(x_ND, rows, block.to_gradient(loss.factor))
    return block.losses_R.sum(dtype=torch.float64)


class _Block:
    """The logits of some rows with their losses, computed for few rows at a time: fp32 copies would take more memory.

    Args:
        logits_RV: this rank's columns of the logits; `to_gradient` overwrites them.
        targets_R: see HeadLoss.
        call: the arguments of the loss.

    Attributes:
        losses_R: fp32, the same on all ranks.
    """

    def __init__(self, logits_RV: torch.Tensor, targets_R: torch.Tensor, call: _HeadCall) -> None:
        self._steps, tp = call.steps, call.head.tp
        first = tp.rank * logits_RV.shape[-1]
        num_real = max(0, min(logits_RV.shape[-1], call.loss.vocab_size - first))
        self._logits_RV, self._real_RV = logits_RV, logits_RV[:, :num_real]
        self._top_R = all_reduce_max(_top(self._real_RV), tp)
        self._valid_R = targets_R != IGNORED
        local_R = targets_R - first
        self._here_R = self._valid_R & (local_R >= 0) & (local_R < num_real)
        self._index_R1 = local_R.masked_fill(~self._here_R, 0).unsqueeze(-1)
        target_R = logits_RV.gather(-1, self._index_R1).squeeze(-1).float() - self._top_R
        total_R = self._steps.exponential_sums(self._real_RV, self._top_R)
        target_R, self._total_R = all_reduce(
            torch.stack((target_R.masked_fill(~self._here_R, 0.0), total_R)), tp
        ).unbind()
        self.losses_R = (self._total_R.log() - target_R).masked_fill(~self._valid_R, 0.0)

    def to_gradient(self, factor: float) -> torch.Tensor:
        """Returns the gradient of the summed loss times `factor`, in the memory of the logits."""
        self._logits_RV[:, self._real_RV.shape[-1] :] = 0.0
        scale_R1 = (self._valid_R * torch.tensor(factor, dtype=torch.float32)).unsqueeze(-1)
        rows_of = RowStatistics(self._top_R, self._total_R, self._index_R1, self._here_R, scale_R1)
        self._steps.overwrite_by_gradient(self._real_RV, rows_of)
        return self._logits_RV


def _exponentials(logits_RV: torch.Tensor, top_R: torch.Tensor) -> torch.Tensor:
    """Returns exp(logits - top) in fp32."""
    return logits_RV.float().sub(top_R.unsqueeze(-1)).exp_()


def _top(real_RV: torch.Tensor) -> torch.Tensor:
    """Returns the maximum of each row in fp32, or -inf if all of this rank's columns are padding."""
    if not real_RV.shape[-1]:
        return real_RV.new_full(real_RV.shape[:1], float("-inf"), dtype=torch.float32)
    return real_RV.amax(dim=-1).float()


def _gathered(x_BLD: torch.Tensor, head: ParallelProduct) -> torch.Tensor:
    return all_gather_dim(x_BLD, SEQUENCE, head.tp) if head.sequence_parallel else x_BLD


def _times(gradient: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor | None:
    """Returns a gradient times that of the loss, which is 1 in training; on a GPU, to read it would stop the CPU."""
    if gradient is None or (factor.device.type == "cpu" and factor.item() == 1):
        return gradient
    return gradient * factor.to(gradient.dtype)
