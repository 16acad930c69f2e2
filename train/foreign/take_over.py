"""How `initialize` takes a module over: ranks meet, all get rank 0's values, flat buffers hold them from then on."""

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ...core.local_params import LocalParam
from ...parallel.collectives import broadcast
from ...parallel.mesh import Group, Mesh, cpu_shard_group
from ..config.sections import OptimizerSection, PrecisionSection
from ..engine.training_engine import TrainingEngine, TrainingOptions
from .model import ForeignModel
from .options import InitializeOptions


def build_engine(
    foreign: ForeignModel,
    values: dict[str, torch.Tensor],
    mesh: Mesh,
    options: OptimizerSection,
    settings: InitializeOptions,
    device: torch.device,
) -> TrainingEngine:
    """The engine that trains the module from `values`, which it takes one by one."""

    def fill(local: LocalParam, parameter: torch.Tensor) -> None:
        parameter.copy_(values.pop(local.name))

    training = TrainingOptions(options, PrecisionSection(params=settings.precision), overlap=settings.overlap)
    engine = TrainingEngine([foreign.module], foreign.table, mesh, training, device=device, fill=fill)
    if settings.zero == 3:
        units = foreign.units(engine.buffers)
        engine.gather_by_agreement(units, cpu_shard_group(mesh, settings.timeout_seconds), prefetch=settings.overlap)
        if mesh.world.rank == 0:
            foreign.tell_sizes(units)
    return engine


def take_values(model: nn.Module, dtype: torch.dtype, world: Group) -> dict[str, torch.Tensor]:
    """Gives every rank rank 0's values, buffers that are not saved included; returns those of `state_dict`, by name."""
    for parameter in model.parameters():
        parameter.grad = None
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()
        plain = tensor.data.view(-1).view(torch.uint8) if tensor.numel() else tensor.data
        broadcast(plain, world)
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def join_job(device: torch.device, timeout_seconds: float) -> int:
    """The number of ranks, in torchrun's job if we are in one."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        atexit.register(_leave)
    return dist.get_world_size() if dist.is_initialized() else 1


def _leave() -> None:
    """Ends the process group that `join_job` began, while the interpreter is whole: a thread of it that wants to give
    back a tensor when there is none any more ends the process with SIGABRT. A rank that failed leaves at once: what it
    had begun with others may never end."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
