"""Operators of torch whose backward adds up a low-precision weight's gradient in that precision on a CPU: here in fp32.

In bf16 a sum of equal terms comes to a halt after 256 of them: an embedding loses half the gradient of a token that
occurs 1,000 times in a micro-batch, a LayerNorm half of its bias's. Elsewhere torch adds up in fp32 by itself.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .row_blocks import row_blocks


def embedding(ids_N: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Rows of a table: int64 [...] -> [..., D]."""
    if _is_added_up_wide(weight_VD):
        return F.embedding(ids_N, weight_VD)
    return _Embedding.apply(ids_N, weight_VD)  # type: ignore[no-untyped-call, no-any-return]


def layer_norm(x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim, [..., D] -> [..., D]."""
    if _is_added_up_wide(weight_D) or torch.compiler.is_compiling():
        return F.layer_norm(x_ND, weight_D.shape, weight_D, bias_D, eps)
    return _LayerNorm.apply(x_ND, weight_D, bias_D, eps)  # type: ignore[no-untyped-call, no-any-return]


def _is_added_up_wide(weight: torch.Tensor) -> bool:
    return weight.device.type != "cpu" or weight.dtype.itemsize >= torch.float32.itemsize


class _Embedding(torch.autograd.Function):
    """Adds up one fp32 row per id that occurs, not the whole table's."""

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


class _LayerNorm(torch.autograd.Function):
    """torch's own backward in fp32, over blocks of rows; its statistics too, which torch keeps in low precision."""

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
