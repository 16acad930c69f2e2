"""The steps by which `initialize` takes over a module: check it, give ranks its values, make flat buffers."""

import os
from collections.abc import Sequence

import torch
from torch import nn

from ...checkpoint.read.shared_read import share_errors
from ...core.given_paths import as_path
from ...core.process import return_freed_memory
from ...model.peers import peers
from ...parallel.mesh import Mesh, cpu_shard_group
from ...parallel.torch_dtypes import torch_dtype
from ..config.sections import OptimizerSection, PrecisionSection
from ..engine.training_engine import TrainingEngine, TrainingOptions
from ..zero.trained_parameter import TrainedParameter
from .blocks import find_blocks
from .checks import check_alike, check_module, describe
from .context_model import ModelAttention
from .context_parallel import ContextParallel
from .first_values import FirstValues, broadcast_bytes, give_values
from .join_job import join_job
from .model import ForeignModel
from .options import InitializeOptions
from .peft_adapter import PeftAdapter
from .stored_weights import StoredWeights


def take_over(
    model: nn.Module,
    gather_together: str | nn.Module | Sequence[str | nn.Module],
    options: OptimizerSection,
    settings: InitializeOptions,
    weights: str | os.PathLike[str] | None,
) -> tuple[ForeignModel, TrainingEngine, ContextParallel | None]:
    """Makes an engine that trains a module, and what runs it on a part of each row if cp > 1; see `initialize`."""
    dtype, loads = torch_dtype(settings.precision), weights is not None
    device = check_module(model, dtype, loads)
    attention = ModelAttention.of(model, settings.cp, settings.cp_mode) if settings.cp > 1 else None
    blocks = find_blocks(model, gather_together)
    world_size = join_job(device, settings.timeout_seconds)
    mesh = Mesh.build(settings.layout(world_size), 1, timeout_seconds=settings.timeout_seconds)
    adapter = PeftAdapter.of(model, log=mesh.world.rank == 0)
    lines = [repr(options), repr(settings), f"loads weights: {loads}", repr(list(blocks)), repr(adapter)]
    check_alike([*lines, *describe(model)], mesh.world)
    names = adapter.names if adapter else {}
    stored = StoredWeights.open(as_path(weights), model, mesh.world, names) if weights is not None else None
    with share_errors(peers(mesh.world)):
        record = adapter.record(settings.precision, known=not loads) if adapter and mesh.world.rank == 0 else None
    values = _take_values(model, dtype, device, mesh, stored)
    foreign = ForeignModel.of(model, blocks, adapter, record)
    engine = _build_engine(foreign, values, mesh, options, settings, device)
    context = ContextParallel(model, attention, settings.cp_mode, mesh.cp, device) if attention else None
    return foreign, engine, context


def _build_engine(
    foreign: ForeignModel,
    values: FirstValues,
    mesh: Mesh,
    options: OptimizerSection,
    settings: InitializeOptions,
    device: torch.device,
) -> TrainingEngine:
    """Makes the engine that trains the module; each of `values` is forgotten once it is copied."""
    training = TrainingOptions(
        options, PrecisionSection(params=settings.precision), overlap=settings.overlap, offload=settings.offload
    )
    engine = TrainingEngine([foreign.module], foreign.table, mesh, training, device=device, fill=values.fill)
    if settings.zero == 3:
        units = foreign.units(engine.buffers)
        engine.gather_by_agreement(units, cpu_shard_group(mesh, settings.timeout_seconds), prefetch=settings.overlap)
        engine.optimizer.behind = settings.offload.optimizer != "none"
        if mesh.world.rank == 0:
            foreign.log_sizes(units)
    if values.stored:
        values.stored.load(engine)
    return_freed_memory()
    return engine


def _take_values(
    model: nn.Module, dtype: torch.dtype, device: torch.device, mesh: Mesh, stored: StoredWeights | None
) -> FirstValues:
    """Makes the module's parameters those of an engine, and gives every rank rank 0's buffers, saved or not.

    Returns:
        The values of parameters: the stored ones if there are any, else rank 0's on every rank.
    """
    values = FirstValues(mesh, stored)
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
        broadcast_bytes(buffer.data, mesh.world)
    give_values(model, device)
    return values
