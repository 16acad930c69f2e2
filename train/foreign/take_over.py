"""The steps by which `initialize` takes over a module: join the job, broadcast rank 0's values, make flat buffers."""

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
from ..zero.trained_parameter import TrainedParameter
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
    """Makes the engine that trains the module; removes each of `values` once it is copied."""

    def fill(local: LocalParam, parameter: torch.Tensor) -> None:
        parameter.copy_(values.pop(local.name))

    training = TrainingOptions(
        options, PrecisionSection(params=settings.precision), overlap=settings.overlap, offload=settings.offload
    )
    engine = TrainingEngine([foreign.module], foreign.table, mesh, training, device=device, fill=fill)
    if settings.zero == 3:
        units = foreign.units(engine.buffers)
        engine.gather_by_agreement(units, cpu_shard_group(mesh, settings.timeout_seconds), prefetch=settings.overlap)
        engine.optimizer.behind = settings.offload.optimizer != "none"
        if mesh.world.rank == 0:
            foreign.log_sizes(units)
    return engine


def take_values(model: nn.Module, dtype: torch.dtype, world: Group) -> dict[str, torch.Tensor]:
    """Gives every rank rank 0's values, buffers that are not saved included; returns those of `state_dict`, by name."""
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            parameter.__class__ = TrainedParameter
            parameter.fqn = name  # type: ignore[attr-defined]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()
        plain = tensor.data.view(-1).view(torch.uint8) if tensor.numel() else tensor.data
        broadcast(plain, world)
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def join_job(device: torch.device, timeout_seconds: float) -> int:
    """Joins the job of torchrun, if this process is in one; returns the number of ranks."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        atexit.register(_leave, os.getpid())
    return dist.get_world_size() if dist.is_initialized() else 1


def _leave(process_id: int) -> None:
    """Ends the process group of `join_job` while the interpreter still works.

    Later, a thread of the group that releases a tensor would end the process with SIGABRT. A rank that failed does not
    wait for the group: its collectives may never end. A fork of the process leaves the group to it.
    """
    if os.getpid() == process_id and dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
