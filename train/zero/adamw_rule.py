"""The update rule of AdamW (arXiv 1711.05101) for a range of a flat bucket: in C on a CPU, else torch's fused one."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from .native_adamw import AdamWUpdate, NativeAdamW, native_adamw


@dataclass(frozen=True, slots=True)
class AdamWFactors:
    """The numbers of one update.

    Attributes:
        step: the number of the update, from 1 on.
        lr: the learning rate.
        betas: the decay of both moments.
        eps: is added to the root of the second moment.
        weight_decay: the decay of the parameters, times the learning rate.
        grad_scale: the factor for gradients, for clipping and the loss scale.
    """

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_scale: float


@dataclass(frozen=True, slots=True)
class AdamWStreams:
    """What an update reads and writes, all 1-D of one length.

    Attributes:
        master: the parameters, fp32.
        exp_avg: the first moment, fp32.
        exp_avg_sq: the second moment, fp32.
        grad: the gradients, fp32, which an update only reads.
        rounded: takes the new masters in a lower precision; None = nothing does.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    rounded: torch.Tensor | None = None


class AdamWRule(Protocol):
    """Makes one update."""

    def __call__(self, streams: AdamWStreams, factors: AdamWFactors) -> None: ...


def adamw_rule(device: torch.device) -> AdamWRule:
    """Returns the rule for tensors of a device; a CPU without a compiler has torch's."""
    native = native_adamw() if device.type == "cpu" else None
    return torch_rule if native is None else NativeRule(native)


def torch_rule(streams: AdamWStreams, factors: AdamWFactors) -> None:
    """Updates with torch's fused kernel, which would write the scaled gradients back if it scaled them."""
    scale = factors.grad_scale
    adamw(
        [streams.master],
        [streams.grad if scale == 1.0 else streams.grad * scale],
        [streams.exp_avg],
        [streams.exp_avg_sq],
        [],
        [torch.tensor(float(factors.step - 1), device=streams.master.device)],
        fused=True,
        amsgrad=False,
        beta1=factors.betas[0],
        beta2=factors.betas[1],
        lr=factors.lr,
        weight_decay=factors.weight_decay,
        eps=factors.eps,
        maximize=False,
    )
    if streams.rounded is not None:
        streams.rounded.copy_(streams.master)


class NativeRule:
    """Updates in C, with torch's number of threads, in one pass if parameters are bf16 or fp32."""

    def __init__(self, native: NativeAdamW) -> None:
        self._native = native

    def __call__(self, streams: AdamWStreams, factors: AdamWFactors) -> None:
        """Makes one update."""
        (beta1, beta2), rounded = factors.betas, streams.rounded
        in_pass = rounded is not None and rounded.dtype == torch.bfloat16
        update = AdamWUpdate(
            count=streams.master.numel(),
            master=streams.master.data_ptr(),
            exp_avg=streams.exp_avg.data_ptr(),
            exp_avg_sq=streams.exp_avg_sq.data_ptr(),
            grad=streams.grad.data_ptr(),
            bf16=rounded.data_ptr() if rounded is not None and in_pass else None,
            grad_factor=factors.grad_scale,
            decay_factor=1 - factors.lr * factors.weight_decay,
            new_avg=1 - beta1,
            old_sq=beta2,
            new_sq=1 - beta2,
            step_size=factors.lr / (1 - beta1**factors.step),
            root=math.sqrt(1 - beta2**factors.step),
            eps=factors.eps,
        )
        self._native(update, torch.get_num_threads())
        if rounded is not None and not in_pass:
            rounded.copy_(streams.master)
