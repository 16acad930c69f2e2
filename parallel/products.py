"""Matrix products of low precision, which a CPU without kernels for their dtype computes in fp32 and rounds once.

On such a CPU torch's own low-precision products take 25 to 60 times as long as those of fp32. The tensors that are
kept for backward stay in low precision. Products that are not rounded at all are computed alike on every device.

Letters: N any leading dims, D in features, F out features.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F

# The dtypes for which oneDNN has no kernels on this CPU, by the check that ATen makes before it takes its own loops.
_WITHOUT_KERNELS: Final = frozenset(
    dtype
    for dtype, supported in (
        (torch.bfloat16, torch.ops.mkldnn._is_mkldnn_bf16_supported),
        (torch.float16, torch.ops.mkldnn._is_mkldnn_fp16_supported),
    )
    if not supported()
)


def in_fp32(tensor: torch.Tensor) -> bool:
    """Returns whether products of a tensor are computed in fp32 on its device."""
    return tensor.dtype in _WITHOUT_KERNELS and tensor.device.type == "cpu"


def linear(x_ND: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x W^T plus the bias: [..., D] -> [..., F], all of one dtype."""
    if not in_fp32(weight_FD):
        return F.linear(x_ND, weight_FD, bias_F)
    y_NF: torch.Tensor = _Linear.apply(x_ND, weight_FD, bias_F, x_ND.dtype)  # type: ignore[no-untyped-call]
    return y_NF


def wide_linear(x_ND: torch.Tensor, weight_FD: torch.Tensor) -> torch.Tensor:
    """Returns x W^T in fp32, whatever the one dtype of x and W: [..., D] -> [..., F]. Gradients are rounded to it."""
    if weight_FD.dtype == torch.float32:
        return F.linear(x_ND, weight_FD)
    y_NF: torch.Tensor = _Linear.apply(x_ND, weight_FD, None, torch.float32)  # type: ignore[no-untyped-call]
    return y_NF


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns `torch.matmul` of two tensors, outside of autograd."""
    return torch.matmul(a.float(), b.float()).to(a.dtype) if in_fp32(a) else torch.matmul(a, b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        return F.linear(x_ND.float(), weight_FD.float(), None if bias_F is None else bias_F.float()).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, weight_FD = ctx.saved_tensors
        grad_NF, dtype, (for_input, for_weight, for_bias, _) = grads[0].float(), x_ND.dtype, ctx.needs_input_grad
        grad_TF = grad_NF.flatten(0, -2)
        grad_ND = torch.matmul(grad_NF, weight_FD.float()).to(dtype) if for_input else None
        grad_FD = torch.matmul(grad_TF.t(), x_ND.flatten(0, -2).float()).to(dtype) if for_weight else None
        grad_F = grad_TF.sum(0).to(dtype) if for_bias else None
        return grad_ND, grad_FD, grad_F, None
