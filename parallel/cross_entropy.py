"""Cross entropy on logits that are split over the vocabulary; the full logits are never gathered."""

from typing import Any

import torch

from .collectives import all_reduce, all_reduce_max
from .mesh import Group

IGNORED = -100  # target of a position that takes no part in the loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
        first = tp.rank * logits_NV.shape[-1]
        num_real = max(0, min(logits_NV.shape[-1], vocab_size - first))
        x_NV = logits_NV.float()
        if x_NV is logits_NV:
            x_NV = x_NV.clone()
        x_NV[:, num_real:] = float("-inf")
        top_N = all_reduce_max(x_NV.amax(dim=-1), tp)
        x_NV -= top_N.unsqueeze(-1)
        valid_N = targets_N != IGNORED
        local_N = targets_N - first
        here_N = valid_N & (local_N >= 0) & (local_N < num_real)
        index_N1 = local_N.masked_fill(~here_N, 0).unsqueeze(-1)
        target_N = all_reduce(x_NV.gather(-1, index_N1).squeeze(-1).masked_fill(~here_N, 0.0), tp)
        probabilities_NV = x_NV.exp_()
        total_N = all_reduce(probabilities_NV.sum(dim=-1), tp)
        probabilities_NV /= total_N.unsqueeze(-1)
        ctx.save_for_backward(probabilities_NV, index_N1, here_N, valid_N)
        ctx.dtype = logits_NV.dtype
        return (total_N.log() - target_N).masked_fill(~valid_N, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities_NV, index_N1, here_N, valid_N = ctx.saved_tensors
        grad_NV = probabilities_NV.clone()
        grad_NV.scatter_add_(-1, index_N1, -here_N.to(grad_NV.dtype).unsqueeze(-1))
        grad_NV *= (grads[0] * valid_N).unsqueeze(-1)
        return grad_NV.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, tp: Group
) -> torch.Tensor:
    """-log softmax(logits)[target] per position, in fp32, 0 where the target is IGNORED.

    Args:
        logits_NV: this rank's columns [N, V / tp] of the padded vocabulary, any float dtype.
        targets_N: int64 ids below `vocab_size`, or IGNORED; the same on every rank.
        vocab_size: unpadded; columns beyond it are masked out.

    Returns:
        fp32 [N], the same on every rank; its gradient reaches this rank's columns.
    """
    return _VocabParallelCrossEntropy.apply(logits_NV, targets_N, vocab_size, tp)  # type: ignore[no-any-return, no-untyped-call]
