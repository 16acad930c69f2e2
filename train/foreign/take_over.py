"""The steps by which `initialize` takes over a module: join the job, give ranks rank 0's values, make flat buffers."""

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ...core.local_params import LocalParam
from ...parallel.mesh import Group, Mesh, cpu_shard_group
from ..config.sections import OptimizerSection, PrecisionSection
from ..engine.training_engine import TrainingEngine, TrainingOptions
from ..zero.trained_parameter import TrainedParameter
from .first_values import FirstValues, broadcast_bytes, give_values
from .model import ForeignModel
from .options import InitializeOptions
from .stored_weights import StoredWeights


def build_engine(
    foreign: ForeignModel,
    values: FirstValues,
    mesh: Mesh,
    options: OptimizerSection,
    settings: InitializeOptions,
    device: torch.device,
) -> TrainingEngine:
    """Makes the engine that trains the module; each of `values` is forgotten once it is copied."""

    def fill(local: LocalParam, parameter: torch.Tensor) -> None:
        values.write(local.name, parameter)

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
    if values.stored:
        values.stored.load(engine, foreign.table)
    return engine


def take_values(
    model: nn.Module, dtype: torch.dtype, device: torch.device, world: Group, stored: StoredWeights | None
) -> FirstValues:
    """Makes the module's parameters those of an engine, and gives every rank rank 0's buffers, saved or not.

    Returns:
        The values of parameters: the stored ones if there are any, else rank 0's on every rank.
    """
    values = FirstValues(world, stored)
    for name, parameter in model.named_parameters():
        parameter.grad = None
        kept = dtype if parameter.is_floating_point() else parameter.dtype
        if parameter.is_meta:
            values.take_absent(name, parameter, kept, device)
        else:
            parameter.data = parameter.data.to(device, kept).contiguous()
            values.take(name, parameter)
        if parameter.requires_grad:
            parameter.__class__ = TrainedParameter
            parameter.fqn = name  # type: ignore[attr-defined]
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device).contiguous()
        broadcast_bytes(buffer.data, world)
    give_values(model, device)
    return values


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
