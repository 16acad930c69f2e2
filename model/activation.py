"""The activations of feed-forward blocks: SwiGLU's gate (arXiv 2002.05202) and GELU (arXiv 1606.08415)."""

from typing import Any

import torch
import torch.nn.functional as F

from ..parallel import fusion


def swiglu(gate_up_NF: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up [..., F] of gate and up, concatenated as [..., 2F]."""
    if fusion.has_few_kernels(gate_up_NF) and not torch.compiler.is_compiling():
        return _SwiGLU.apply(gate_up_NF)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_up_NF.chunk(2, dim=-1)
    return F.silu(gate.contiguous()) * up  # on strided rows the bits of silu depend on a value's place in its row


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """Returns GELU in its tanh approximation, elementwise."""
    return F.gelu(x, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    """The gate in two kernels, with a backward in three: each half of the gradient is written where it belongs."""

    @staticmethod
    def forward(ctx: Any, gate_up_NF: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_NF.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up_NF, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gate_up_NF, activated = ctx.saved_tensors
        gate, up = gate_up_NF.chunk(2, dim=-1)
        grad_NF = torch.empty_like(gate_up_NF)
        grad_gate, grad_up = grad_NF.chunk(2, dim=-1)
        torch.mul(grads[0], activated, out=grad_up)
        torch.ops.aten.silu_backward(grads[0] * up, gate, grad_input=grad_gate)
        return grad_NF
