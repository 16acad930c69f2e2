"""Embedding and LayerNorm whose backward sums a low-precision weight's gradient in fp32 on a CPU, unlike torch's.

In bf16 a sum of equal terms stops growing after 256 of them: torch's embedding loses half of the gradient of a token
that occurs 1,000 times in a micro-batch, its LayerNorm half of the bias's. On other devices torch sums in fp32 too.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .row_blocks import row_blocks


def added(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    """Returns a sum with another term, at least in fp32 from the second term on; it may take the sum's memory."""
    return term if total is None else total.to(wide_dtype(term)).add_(term)


def wide_dtype(term: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a sum of many such terms: fp32, or theirs if it has more bits."""
    return torch.promote_types(term.dtype, torch.float32)


def embedding(ids_N: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Looks up rows of a table: int64 [...] -> [..., D]."""
    if _torch_sums_in_fp32(weight_VD):
        return F.embedding(ids_N, weight_VD)
    return _WideSumEmbedding.apply(ids_N, weight_VD)  # type: ignore[no-untyped-call, no-any-return]


def layer_norm(x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim, [..., D] -> [..., D]."""
    if _torch_sums_in_fp32(weight_D) or torch.compiler.is_compiling():
        return F.layer_norm(x_ND, weight_D.shape, weight_D, bias_D, eps)
    return _WideSumLayerNorm.apply(x_ND, weight_D, bias_D, eps)  # type: ignore[no-untyped-call, no-any-return]


def _torch_sums_in_fp32(weight: torch.Tensor) -> bool:
    return weight.device.type != "cpu" or weight.dtype.itemsize >= torch.float32.itemsize


class _WideSumEmbedding(torch.autograd.Function):
    """An embedding lookup; backward allocates fp32 sums only for the ids that occur, not for the whole table."""

    @staticmethod
    def forward(ctx: Any, ids_N: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids_N)
        ctx.shape = weight_VD.shape
        return F.embedding(ids_N, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids_N,) = ctx.saved_tensors
        grad_TD = grads[0].reshape(-1, ctx.shape[1])
        occurring_U, places_T = ids_N.flatten().unique(return_inverse=True)
        sums_UD = torch.zeros(len(occurring_U), ctx.shape[1]).index_add_(0, places_T, grad_TD.float())
        return None, grad_TD.new_zeros(ctx.shape).index_copy_(0, occurring_U, sums_UD.to(grad_TD.dtype))


class _WideSumLayerNorm(torch.autograd.Function):
    """torch's LayerNorm with its backward in fp32, block of rows by block of rows.

    Backward computes mean and scale again in fp32, because forward would keep them in low precision.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x_ND, weight_D, bias_D)
        ctx.eps = eps
        return F.layer_norm(x_ND, weight_D.shape, weight_D, bias_D, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x_ND, weight_D, bias_D = ctx.saved_tensors
        x_TD, grad_TD = (each.reshape(-1, x_ND.shape[-1]) for each in (x_ND, grads[0]))
        shape, wide = list(weight_D.shape), (weight_D.float(), bias_D.float())
        grad_x_TD, grad_weight_D, grad_bias_D = torch.empty_like(x_TD), *map(torch.zeros_like, wide)
        for rows in row_blocks(x_TD):
            block_TD = x_TD[rows].float()
            _, mean_T1, scale_T1 = torch.native_layer_norm(block_TD, shape, None, None, ctx.eps)
            grad_x_TD[rows], for_weight_D, for_bias_D = torch.ops.aten.native_layer_norm_backward(
                grad_TD[rows].float(), block_TD, shape, mean_T1, scale_T1, *wide, [True, True, True]
            )
            grad_weight_D += for_weight_D
            grad_bias_D += for_bias_D
        dtype = weight_D.dtype
        return grad_x_TD.view(x_ND.shape), grad_weight_D.to(dtype), grad_bias_D.to(dtype), None
