"""The update rule of AdamW (arXiv 1711.05101) for a range of a flat bucket: in C on a CPU, else torch's fused one."""

import logging
import math
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from ...parallel.collectives import gather_bytes
from ...parallel.mesh import ALONE, Group
from .element_index import RandomBits
from .native_adamw import AdamWUpdate, NativeAdamW, native_adamw
from .random_rounding import round_randomly

# Elements of bf16 states of which torch's rule has fp32 copies and random bits at once: as many as a CPU's cache holds,
# or as make the kernels of a GPU worth their start.
_CHUNK: Final = 2**17
_CHUNK_ON_GPU: Final = 2**22

_log = logging.getLogger(__name__)


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
        exp_avg: the first moment, fp32; or bf16, which is rounded to the nearest.
        exp_avg_sq: the second moment, of the same dtype; in bf16 it is rounded by `bits`.
        grad: the gradients, fp32, which an update only reads.
        rounded: takes the new masters in a lower precision; None = nothing does.
        bits: the random bits of the elements, if the moments are bf16; else None.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    rounded: torch.Tensor | None = None
    bits: RandomBits | None = None


class AdamWRule(Protocol):
    """Makes one update."""

    def __call__(self, streams: AdamWStreams, factors: AdamWFactors) -> None: ...


def adamw_rule(device: torch.device, world: Group = ALONE) -> AdamWRule:
    """Returns the rule for tensors of a device: torch's if it is no CPU, or if a rank has no compiler.

    Every rank calls it, and all get the same rule: replicas that were updated by two would differ in their last bits.

    Args:
        world: all ranks.
    """
    if device.type != "cpu":
        return TorchRule(device)
    native = native_adamw()
    lacking = [rank for rank, answer in enumerate(gather_bytes(b"" if native else b"none", world)) if answer]
    if native and not lacking:
        return NativeRule(native)
    if world.rank == 0 and world.size > 1:
        _log.warning(
            "Rank %d has no native AdamW, and its log says why: all %d ranks update with torch's, which takes longer.",
            lacking[0],
            world.size,
        )
    return TorchRule(device)


class TorchRule:
    """Updates with torch's fused kernel, bf16 states in fp32 copies.

    Args:
        device: the device of states.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._count = torch.zeros((), device=device)  # the step, where the kernel reads it

    def __call__(self, streams: AdamWStreams, factors: AdamWFactors) -> None:
        """Makes one update."""
        if factors.step != self._step:
            self._step = factors.step
            self._count = torch.full((), float(factors.step), device=self._device)
        if streams.bits is None:
            self._update(streams, factors)
        else:
            size = _CHUNK if self._device.type == "cpu" else _CHUNK_ON_GPU
            for begin in range(0, streams.master.numel(), size):
                part = slice(begin, begin + size)
                exp_avg, exp_avg_sq = streams.exp_avg[part], streams.exp_avg_sq[part]
                wide = AdamWStreams(streams.master[part], exp_avg.float(), exp_avg_sq.float(), streams.grad[part])
                self._update(wide, factors)
                exp_avg.copy_(wide.exp_avg)
                exp_avg_sq.copy_(round_randomly(wide.exp_avg_sq, streams.bits.from_element(begin), factors.step))
        if streams.rounded is not None:
            streams.rounded.copy_(streams.master)

    def _update(self, streams: AdamWStreams, factors: AdamWFactors) -> None:
        """Calls the kernel of `torch.optim.adamw`, which would make and count up a step for each call."""
        scale = factors.grad_scale
        torch._fused_adamw_(
            [streams.master],
            [streams.grad if scale == 1.0 else streams.grad * scale],  # the kernel would write back what it scales
            [streams.exp_avg],
            [streams.exp_avg_sq],
            [],
            [self._count],
            lr=factors.lr,
            beta1=factors.betas[0],
            beta2=factors.betas[1],
            weight_decay=factors.weight_decay,
            eps=factors.eps,
            amsgrad=False,
            maximize=False,
        )


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
            **_places(streams.bits, factors.step),
        )
        self._native(update, torch.get_num_threads())
        if rounded is not None and not in_pass:
            rounded.copy_(streams.master)


def _places(bits: RandomBits | None, step: int) -> dict[str, int]:
    """Returns the fields of an update that only bf16 states need."""
    if bits is None:
        return {}
    (key, word), index = bits.key(step), bits.index
    return {"key": key, "word": word} | {name: getattr(index, name) for name in ("first", "run", "stride", "start")}
