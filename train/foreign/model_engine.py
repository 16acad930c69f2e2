"""`initialize`: data parallelism with ZeRO, mixed precision and our checkpoints for any `torch.nn.Module`.

engine = initialize(model, {"lr": 3e-4}, zero=2, precision="bf16")
for batch in batches:
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
engine.save("runs/mine")                    # later: engine.load("runs/mine")
"""

import atexit
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import open_together, told_to_all
from ...checkpoint.run.run_folder import RunFolder
from ...checkpoint.save.save_job import SaveJob
from ...core.errors import CheckpointError, ConfigError, TkError
from ...core.layout import Layout, LocalParam
from ...model.loading import peers
from ...parallel.collectives import all_reduce, broadcast
from ...parallel.mesh import Group, Mesh, between_cpus
from ..config.train_config import OptimizerSection, PrecisionSection, TrainSection, param_groups
from ..engine.lr_schedule import learning_rate
from ..engine.nonfinite import NonFinitePolicy
from ..engine.training_engine import DTYPES, TrainingEngine
from ..saving.replica_check import ReplicaCheck
from ..saving.snapshot import Snapshot, slot_dtypes
from .blocks import find_blocks
from .buffers import PersistentBuffers
from .checks import check_alike, check_module, describe
from .model import ForeignModel, whole_state
from .options import InitializeOptions, Precision, Stage, optimizer_section
from .watch import ModuleWatch


def initialize(
    model: nn.Module,
    optimizer: Mapping[str, Any] | OptimizerSection | None = None,
    *,
    zero: Stage = 0,
    precision: Precision = "fp32",
    accumulate: int = 1,
    steps: int = 0,
    shard_size: int = 0,
    bucket_size: int = 2**24,
    overlap: bool = True,
    gather_together: str | nn.Module | Sequence[str | nn.Module] = (),
    timeout_seconds: float = 600.0,
) -> "ModelEngine":
    """Takes over a module: its parameters move into flat buffers, gradients are exchanged during backward.

    Under torchrun (RANK and WORLD_SIZE set) every rank calls it with the same model; rank 0's values count.

    Args:
        model: any module of plain tensors. Its floating-point parameters become of `precision`, frozen ones too;
            buffers keep their dtype. Gradients that it has are forgotten.
        optimizer: keys of [optimizer] (docs/training/configuration.md); the schedule is constant unless given.
        accumulate: micro-batches per optimizer step, each with one call of `backward`.
        steps: optimizer steps in all, for schedules that end.
        gather_together: for ZeRO stage 3, blocks that ranks may call differently or not at all: modules, or names and
            patterns of names ("decoder.layers.*"). They are gathered whenever the model is called, not one by one.

    Raises:
        ConfigError: an argument is wrong, ranks do not agree, or the module could not be trained or saved as it is (see
            train/foreign/checks.py). Nothing was changed.
        ParallelError: the layout is impossible.
    """
    settings = InitializeOptions.of(
        zero=zero,
        precision=precision,
        accumulate=accumulate,
        steps=steps,
        shard_size=shard_size,
        bucket_size=bucket_size,
        overlap=overlap,
        timeout_seconds=timeout_seconds,
    )
    options = optimizer_section(optimizer, steps)
    dtype = DTYPES[precision]
    device = check_module(model, dtype)
    blocks = find_blocks(model, gather_together)
    world_size = _join(device, timeout_seconds)
    layout = Layout(dp=world_size, zero=zero, shard_size=shard_size, bucket_size=bucket_size)
    mesh = Mesh.build(layout, 1, timeout_seconds=timeout_seconds)
    check_alike([repr(options), repr(settings), repr(list(blocks)), *describe(model)], mesh.world)
    values = _take_over(model, dtype, mesh.world)
    foreign = ForeignModel.of(model, blocks)
    return ModelEngine(foreign, _engine(foreign, values, mesh, options, settings, device), settings)


def _engine(
    foreign: ForeignModel,
    values: dict[str, torch.Tensor],
    mesh: Mesh,
    options: OptimizerSection,
    settings: InitializeOptions,
    device: torch.device,
) -> TrainingEngine:
    """What trains the module from `values`, which it takes one by one."""

    def fill(local: LocalParam, parameter: torch.Tensor) -> None:
        parameter.copy_(values.pop(local.name))

    engine = TrainingEngine(
        [foreign.module],
        foreign.table,
        mesh,
        optimizer=options,
        precision=PrecisionSection(params=settings.precision),
        device=device,
        fill=fill,
        overlap=settings.overlap,
    )
    if settings.zero == 3:
        units = foreign.units(engine.buffers)
        engine.gather_by_agreement(units, between_cpus(mesh, settings.timeout_seconds), prefetch=settings.overlap)
        if mesh.world.rank == 0:
            foreign.tell_sizes(units)
    return engine


def _take_over(model: nn.Module, dtype: torch.dtype, world: Group) -> dict[str, torch.Tensor]:
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


def _join(device: torch.device, timeout_seconds: float) -> int:
    """The number of ranks, in torchrun's job if we are in one."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        atexit.register(_leave)
    return dist.get_world_size() if dist.is_initialized() else 1


def _leave() -> None:
    """Ends the process group that `_join` began, while the interpreter is whole: a thread of it that wants to give back
    a tensor when there is none any more ends the process with SIGABRT. A rank that failed leaves at once: what it had
    begun with others may never end."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


class ModelEngine:
    """A module in training. `engine(batch)` runs it, `engine.module` is the module itself.

    Attributes:
        step_count: optimizer steps made.
        last_grad_norm: before clipping, of the newest step.
    """

    def __init__(self, foreign: ForeignModel, engine: TrainingEngine, settings: InitializeOptions) -> None:
        self.module = foreign.module
        self.step_count = 0
        self.last_grad_norm = 0.0
        self._foreign = foreign
        self._engine = engine
        self._settings = settings
        self._watch = ModuleWatch(foreign.module, foreign.table, engine.buffers)
        self._buffers = PersistentBuffers(foreign.module, foreign.table, engine.mesh.world)
        self._snapshot = Snapshot(engine.optimizer, foreign.table)
        self._replicas = ReplicaCheck(self._snapshot, engine.mesh.world)
        self._nonfinite = NonFinitePolicy(TrainSection(), engine)
        self._passes = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        engine.exchange.closed = True

    def __call__(self, batch: Any) -> Any:
        """Runs the module: keywords from a mapping, arguments from a tuple or list, else one argument.

        Returns:
            The output's loss where it has one (`.loss`, or ["loss"] of a mapping), else the output.
        """
        with self._engine.whole_pass():
            if isinstance(batch, Mapping):
                output = self.module(**batch)
            else:
                output = self.module(*batch) if isinstance(batch, tuple | list) else self.module(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return output if loss is None else loss

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch's mean loss; over micro-batches and ranks the mean of those means counts.

        Raises:
            ConfigError: `accumulate` micro-batches have gone backward since the last step. Their gradients may be under
                way to other ranks already, where another one would be lost, or added while they are read (NCCL).
            TkError: at ZeRO stage 3, ranks called different parts of the model.
        """
        if self._passes == self._settings.accumulate:
            raise ConfigError(
                f"backward was called once more than accumulate = {self._settings.accumulate} allows before step(). "
                "Each call is one micro-batch: add up its losses, backward(a + b), or raise accumulate."
            )
        if self._passes == 0:
            self._engine.begin_step()
        self._passes += 1
        last = self._passes == self._settings.accumulate
        share = loss / (self._settings.accumulate * self._engine.mesh.world.size)
        self._loss += share.detach()
        self._engine.exchange.closed = False
        try:
            with self._engine.whole_pass():
                self._engine.begin_backward(0, last=last)
                torch.autograd.backward(share * self._engine.loss_scale.value)
        finally:
            self._engine.exchange.closed = True
        self._engine.gradients_arrived(0, last=last)

    def step(self) -> bool:
        """One optimizer step once `accumulate` micro-batches have gone backward; before that it does nothing.

        Returns:
            Whether parameters were updated; not where fp16 overflowed.

        Raises:
            TkError: the loss or the gradient norm is not finite.
        """
        self._engine.refuse_while_whole("step()")
        if self._passes < self._settings.accumulate:
            return False
        self._watch.check()
        self._engine.meet_for_update()
        world = self._engine.mesh.world
        changed = self._buffers.changed(self._engine.device)
        values = torch.stack([self._loss, self._engine.finish_backward(), changed])
        loss, square_sum, changed_ranks = all_reduce(values, world).tolist()
        if changed_ranks:
            self._buffers.agree()
        self.last_grad_norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        updated = self._nonfinite.allows(self.step_count + 1, loss, self.last_grad_norm, self._loss)
        if updated:
            options = self._engine.optimizer.options
            self._engine.update(learning_rate(self.step_count, self._settings.steps, options), self.last_grad_norm)
            self.step_count += 1
        self._passes = 0
        self._loss = torch.zeros_like(self._loss)
        return updated

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """All parameters are whole meanwhile, in `module` itself: to be read, passed on, or changed. Every rank enters
        it and makes the same changes, which last; steps cannot be made inside."""
        with self._engine.whole_parameters():
            yield
        self._watch.expect_written()

    def state_dict(self) -> dict[str, Any]:
        """`module.state_dict()` with whole tensors, copied to the CPU, the same on every rank; every rank calls it. At
        ZeRO stage 3 a part of the model is whole at a time. `save` writes more than that, and writes it in parts."""
        return whole_state(self.module, self._engine)

    def save(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        """Commits a step in a run folder, as `tk train` does, once replicas agree; every rank calls it. A Hugging Face
        model brings its config.json, so that the folder can be served.

        Args:
            keep: newest steps kept; 0 = all.

        Raises:
            CheckpointError: the step is there already, or another job writes there.
            ConfigError: the module has other parameters or buffers than `initialize` saw.
            TkError: replicas have drifted apart, or the disk is full or fails.
        """
        run = Path(folder)
        self._watch.check()
        self._watch.check_names()
        self._buffers.agree()
        self._replicas.check(self.step_count)
        if self._engine.mesh.world.rank == 0:
            with RunFolder(run).lock() as locked:
                self._write(run, int(locked.attempt, 16), keep)
        else:
            self._write(run, 0, keep)
        self._wait()

    def _write(self, run: Path, attempt: int, keep: int) -> None:
        world, device = self._engine.mesh.world, self._engine.device
        attempt = int(broadcast(torch.tensor(attempt, dtype=torch.int64, device=device), world))
        job = SaveJob(
            run=run,
            attempt=f"{attempt:08x}",
            writer=world.rank,
            table=self._foreign.table,
            layout=self._engine.mesh.layout,
            slots=slot_dtypes(self._engine.optimizer),
            param_groups=param_groups(self._engine.optimizer.options, self._foreign.table),
            side_files=_side_files(self.module) if world.rank == 0 else {},
            keep=keep,
            timeout=self._settings.timeout_seconds,
        )
        resume = {"step": self.step_count, "loss_scale": self._engine.loss_scale.to_json()}
        try:
            job.save(self.step_count, resume, self._snapshot.values)
        except OSError as error:
            raise TkError(f"Step {self.step_count} cannot be saved in {run}: {error.strerror or error}.") from error

    def _wait(self) -> None:
        all_reduce(torch.zeros((), device=self._engine.device), self._engine.mesh.world)

    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Continues from a checkpoint that any number of ranks and any ZeRO stage wrote; every rank calls it.

        Raises:
            CheckpointError: it holds weights only, or cannot be used.
        """
        self._engine.refuse_while_whole("load()")
        ranks = peers(self._engine.mesh.world)
        opened = open_together(lambda: Checkpoint.open(Path(checkpoint)), ranks)
        with told_to_all(ranks):
            self._watch.check()
            if "step" not in opened.resume:
                raise CheckpointError(f"{opened.path} holds weights only: there is nothing to resume.")
            self._watch.check_stored(opened)
        with told_to_all(ranks):
            self._snapshot.load(opened)
        self._snapshot.publish()
        self.step_count = self._engine.optimizer.step_count = int(opened.resume["step"])
        self._engine.loss_scale.restore(opened.resume.get("loss_scale"))
        self._buffers.agree()


def _side_files(module: nn.Module) -> dict[str, bytes]:
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    return {"config.json": json.dumps(to_dict(), indent=2).encode()} if to_dict else {}
