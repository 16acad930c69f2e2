"""Causal attention of bf16 heads by the native kernel, as an operator that autograd and torch.compile know.

torch's own kernel takes three times as long on a CPU without AMX, above all in backward.

Letters: B batch, L length, H query heads, K key heads, E head dim.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from ...model.attention import Attend, AttendingLayer
from .native_attention import WIDTHS, AttentionCall, HeadsView, native_attention

_MOST_OFF: Final = 2e-2  # of a norm; values are rounded to bf16 several times, by up to 2**-9 each
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockedAttention:
    """Causal attention by the native kernel, and by another one of what it does not take: see `__call__`.

    Attributes:
        other: the other attention.
        threads: the number of threads that compute.
    """

    other: Attend
    threads: int

    def __call__(
        self, at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor
    ) -> torch.Tensor:
        """Computes causal attention within the rows, [B, L, H, E] -> [B, L, H, E].

        The kernel takes bf16 heads of 64 dims or a multiple of it, without a window, if each thread gets a key head.
        """
        taken = q_BLHE.dtype == torch.bfloat16 and q_BLHE.device.type == "cpu" and not q_BLHE.shape[-1] % WIDTHS
        if not taken or at.window is not None or k_BLKE.shape[0] * k_BLKE.shape[2] < self.threads:
            return self.other(at, q_BLHE, k_BLKE, v_BLKE)
        found: torch.Tensor
        if torch.compiler.is_compiling():
            found, _ = compiled_attention(q_BLHE, k_BLKE, v_BLKE)
        else:  # the first call of an operator imports torch's compiler, which takes seconds
            found = blocked_attention(q_BLHE, k_BLKE, v_BLKE)
        return found


def blocked_or(other: Attend) -> Attend:
    """Returns causal attention that computes what it can by the native kernel, if this machine has it."""
    return BlockedAttention(other, torch.get_num_threads()) if _is_usable() else other


@cache
def _is_usable() -> bool:
    """Returns whether there is a kernel, and it computes what it was built for: compilers have faults."""
    if native_attention() is None:
        return False
    off = _off_from_torch()
    if all(each < _MOST_OFF for each in off):
        return True
    _LOG.warning("The native kernel of attention is not used: it is off from torch's by %s of a norm.", off)
    return False


@torch.no_grad()  # no hook of the pass that begins sees anything of this
def _off_from_torch() -> list[float]:
    """Returns how far outputs and gradients of a small attention are from torch's in fp32, as shares of their norms."""
    noise, length, heads = torch.Generator().manual_seed(0), 70, 2
    q, k, v, grad = (torch.randn(1, length, n, WIDTHS, generator=noise).bfloat16() for n in (heads, 1, 1, heads))
    out, lse = _forward(q, k, v)
    found = (out, *_gradients(grad, q, k, v, out, lse))
    q_HLE, k_1LE, v_1LE, grad_HLE = (each[0].float().transpose(0, 1) for each in (q, k, v, grad))
    unseen_LL, scale = torch.ones(length, length).triu(1).bool(), WIDTHS**-0.5
    weights_HLL = (scale * q_HLE @ k_1LE.mT).masked_fill(unseen_LL, -torch.inf).softmax(-1)
    slopes_HLL = grad_HLE @ v_1LE.mT
    slopes_HLL = scale * weights_HLL * (slopes_HLL - (weights_HLL * slopes_HLL).sum(-1, keepdim=True))
    keys, values = ((each.mT @ other).sum(0, True) for each, other in ((slopes_HLL, q_HLE), (weights_HLL, grad_HLE)))
    right = (weights_HLL @ v_1LE, slopes_HLL @ k_1LE, keys, values)
    return [float((a[0].float() - b.transpose(0, 1)).norm() / b.norm()) for a, b in zip(found, right, strict=True)]


def blocked_attention(q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor) -> torch.Tensor:
    """Returns causal attention by the native kernel, [B, L, H, E] -> [B, L, H, E] in bf16, with its gradients."""
    found: torch.Tensor = _AttentionFunction.apply(q_BLHE, k_BLKE, v_BLKE)  # type: ignore[no-untyped-call]
    return found


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *heads: torch.Tensor) -> torch.Tensor:
        out, lse = _forward(*heads)
        ctx.save_for_backward(*heads, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_BLHE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _gradients(grad_BLHE, *ctx.saved_tensors)


def _forward(q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs [B, L, H, E] and the logarithms of the softmax's sums, fp32 [B, H, L]."""
    q, k, v = (_dense(each) for each in (q_BLHE, k_BLKE, v_BLKE))
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    _run({"q": q, "k": k, "v": v, "out": out}, lse)
    return out, lse


def _gradients(
    grad_BLHE: torch.Tensor,
    q_BLHE: torch.Tensor,
    k_BLKE: torch.Tensor,
    v_BLKE: torch.Tensor,
    out_BLHE: torch.Tensor,
    lse_BHL: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v from that of the outputs and what `_forward` returned."""
    given = (grad_BLHE, q_BLHE, k_BLKE, v_BLKE, out_BLHE)
    grad, q, k, v, out = (_dense(each) for each in given)
    grad_q, grad_k, grad_v = (torch.empty(each.shape, dtype=each.dtype) for each in (q, k, v))
    written = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    _run({"grad_out": grad, "q": q, "k": k, "v": v, "out": out, **written}, lse_BHL)
    return grad_q, grad_k, grad_v


# The same as operators, which compiled programs call.
compiled_attention = torch.library.custom_op("tk::causal_attention", _forward, mutates_args=())
_compiled_gradients = torch.library.custom_op("tk::causal_attention_backward", _gradients, mutates_args=())


@compiled_attention.register_fake
def _(q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, heads, _ = q_BLHE.shape
    return q_BLHE.new_empty(q_BLHE.shape), q_BLHE.new_empty((batch, heads, length), dtype=torch.float32)


@_compiled_gradients.register_fake
def _(
    grad_BLHE: torch.Tensor,
    q_BLHE: torch.Tensor,
    k_BLKE: torch.Tensor,
    v_BLKE: torch.Tensor,
    out_BLHE: torch.Tensor,
    lse_BHL: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q_BLHE.new_empty(q_BLHE.shape), k_BLKE.new_empty(k_BLKE.shape), v_BLKE.new_empty(v_BLKE.shape)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad_BLHE: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grads: tuple[torch.Tensor, ...] = _compiled_gradients(grad_BLHE, *ctx.saved_tensors)
    return grads


compiled_attention.register_autograd(_backward, setup_context=_save)


def _dense(x_BLHE: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose heads are dense."""
    return x_BLHE if x_BLHE.stride(-1) == 1 else x_BLHE.contiguous()


def _run(tensors: dict[str, torch.Tensor], lse_BHL: torch.Tensor) -> None:
    kernel = native_attention()
    assert kernel is not None
    q, key_heads = tensors["q"], tensors["k"].shape[2]
    views = {name: HeadsView(each.data_ptr(), *each.stride()[:3]) for name, each in tensors.items()}
    call = AttentionCall(*q.shape[:3], key_heads, q.shape[3], scale=q.shape[3] ** -0.5, lse=lse_BHL.data_ptr(), **views)
    kernel(call, backward="grad_out" in tensors, threads=torch.get_num_threads())
