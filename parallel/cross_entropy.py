"""Cross entropy on logits that are split over the vocabulary; the full logits are never gathered."""

from typing import Any

import torch

from ..core.labels import IGNORED
from .collectives import all_reduce, all_reduce_max
from .mesh import Group
from .row_blocks import row_blocks


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps the logits in their own dtype and computes probabilities for a block of rows at a time.

    fp32 copies of all logits would be the largest tensors of a training step.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
        first = tp.rank * logits_NV.shape[-1]
        num_real = max(0, min(logits_NV.shape[-1], vocab_size - first))
        real_NV = logits_NV[:, :num_real]
        top_N = all_reduce_max(_top(real_NV), tp)
        valid_N = targets_N != IGNORED
        local_N = targets_N - first
        here_N = valid_N & (local_N >= 0) & (local_N < num_real)
        index_N1 = local_N.masked_fill(~here_N, 0).unsqueeze(-1)
        target_N = logits_NV.gather(-1, index_N1).squeeze(-1).float() - top_N
        target_N = all_reduce(target_N.masked_fill(~here_N, 0.0), tp)
        total_N = torch.empty_like(top_N)
        for rows in row_blocks(logits_NV):
            total_N[rows] = _exponentials(real_NV, top_N, rows).sum(dim=-1)
        all_reduce(total_N, tp)
        ctx.save_for_backward(logits_NV, top_N, total_N, index_N1, here_N, valid_N)
        ctx.num_real = num_real
        return (total_N.log() - target_N).masked_fill(~valid_N, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_NV, top_N, total_N, index_N1, here_N, valid_N = ctx.saved_tensors
        real_NV = logits_NV[:, : ctx.num_real]
        grad_NV = torch.zeros_like(logits_NV) if ctx.num_real < logits_NV.shape[-1] else torch.empty_like(logits_NV)
        scale_N1 = (grads[0] * valid_N).unsqueeze(-1)
        for rows in row_blocks(logits_NV) if ctx.num_real else ():
            block_NV = _exponentials(real_NV, top_N, rows).div_(total_N[rows].unsqueeze(-1))
            block_NV.scatter_add_(-1, index_N1[rows], -here_N[rows].to(block_NV.dtype).unsqueeze(-1))
            grad_NV[rows, : ctx.num_real] = block_NV.mul_(scale_N1[rows])
        return grad_NV, None, None, None


def _top(real_NV: torch.Tensor) -> torch.Tensor:
    """Returns the maximum of each row in fp32, or -inf if all of this rank's columns are padding."""
    if not real_NV.shape[-1]:
        return real_NV.new_full(real_NV.shape[:1], float("-inf"), dtype=torch.float32)
    return real_NV.amax(dim=-1).float()


def _exponentials(real_NV: torch.Tensor, top_N: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns exp(logits - top) of the given rows in fp32."""
    return real_NV[rows].float().sub(top_N[rows].unsqueeze(-1)).exp_()


def vocab_parallel_cross_entropy(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, tp: Group
) -> torch.Tensor:
    """Returns -log softmax(logits)[target] per position, and 0 where the target is IGNORED.

    Args:
        logits_NV: this rank's columns [N, V / tp] of the padded vocabulary, any float dtype.
        targets_N: int64 ids below `vocab_size`, or IGNORED; the same on every rank.
        vocab_size: the number of real ids; columns beyond it are padding and do not count.

    Returns:
        fp32 [N], the same on every rank; its gradient reaches this rank's columns.
    """
    return _VocabParallelCrossEntropy.apply(logits_NV, targets_N, vocab_size, tp)  # type: ignore[no-any-return, no-untyped-call]
