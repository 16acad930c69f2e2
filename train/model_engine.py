"""`initialize`: data parallelism with ZeRO, mixed precision and our checkpoints for any `torch.nn.Module`.

engine = initialize(model, {"lr": 3e-4}, zero=2, precision="bf16")
for batch in batches:
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
engine.save("runs/mine")                    # later: engine.load("runs/mine")
"""

import json
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.reader import Checkpoint
from ..checkpoint.run_folder import RunFolder
from ..checkpoint.save_job import SaveJob
from ..core.config import parse
from ..core.errors import CheckpointError, ConfigError, TkError
from ..core.layout import Layout, LocalParam
from ..parallel.collectives import all_reduce, broadcast
from ..parallel.mesh import Mesh
from .config import OptimizerSection, PrecisionSection, TrainSection, param_groups
from .engine import DTYPES, Engine
from .foreign_model import ForeignModel
from .lr_schedule import learning_rate
from .nonfinite import NonFinitePolicy
from .saving.snapshot import Snapshot, slot_dtypes


def initialize(
    model: nn.Module,
    optimizer: Mapping[str, Any] | OptimizerSection | None = None,
    *,
    zero: Literal[0, 1, 2, 3] = 0,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    accumulate: int = 1,
    steps: int = 0,
    shard_size: int = 0,
    bucket_size: int = 2**24,
    overlap: bool = True,
    timeout_seconds: float = 600.0,
) -> "ModelEngine":
    """Takes over a module: its parameters move into flat buffers, gradients are exchanged during backward.

    Under torchrun (RANK and WORLD_SIZE set) every rank calls it with the same model; rank 0's values count.

    Args:
        model: any module; parameters with `requires_grad=False` and buffers are left alone but for their dtype.
        optimizer: keys of [optimizer] (docs/training.md); the schedule is constant unless given.
        accumulate: micro-batches per optimizer step.
        steps: optimizer steps in all, for schedules that end.

    Raises:
        ConfigError: an option is wrong, or nothing in the model learns.
        ParallelError: the layout is impossible.
    """
    options = optimizer if isinstance(optimizer, OptimizerSection) else _optimizer(optimizer or {})
    if options.schedule != "constant" and not steps:
        raise ConfigError(f'schedule = "{options.schedule}" ends: initialize(..., steps=N) must say when.')
    if accumulate < 1:
        raise ConfigError(f"accumulate = {accumulate}; it must be 1 or more.")
    numbers = PrecisionSection(params=precision)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    world_size = _join(device, timeout_seconds)
    layout = Layout(dp=world_size, zero=zero, shard_size=shard_size, bucket_size=bucket_size)
    mesh = Mesh.build(layout, 1, timeout_seconds=timeout_seconds)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[precision])
    foreign = ForeignModel.of(model)
    if not any(spec.trainable for spec in foreign.table):
        raise ConfigError("No parameter of the model has requires_grad=True: there is nothing to train.")
    values = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    for tensor in values.values():
        broadcast(tensor, mesh.world)

    def fill(local: LocalParam, parameter: torch.Tensor) -> None:
        parameter.copy_(values.pop(local.name))

    engine = Engine([model], foreign.table, mesh, optimizer=options, precision=numbers, device=device, fill=fill)
    if zero == 3:
        engine.gather_around([foreign.units(engine.buffers)], prefetch=overlap, chain=False)
    return ModelEngine(foreign, engine, accumulate, steps, timeout_seconds)


def _optimizer(options: Mapping[str, Any]) -> OptimizerSection:
    return parse({"schedule": "constant"} | dict(options), OptimizerSection, "initialize's optimizer")


def _join(device: torch.device, timeout_seconds: float) -> int:
    """The number of ranks, in torchrun's job if we are in one."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return dist.get_world_size() if dist.is_initialized() else 1


class ModelEngine:
    """A module in training. `engine(batch)` runs it, `engine.module` is the module itself.

    Attributes:
        step_count: optimizer steps made.
        last_grad_norm: before clipping, of the newest step.
    """

    def __init__(
        self, foreign: ForeignModel, engine: Engine, accumulate: int, steps: int, timeout_seconds: float
    ) -> None:
        self.module = foreign.module
        self.step_count = 0
        self.last_grad_norm = 0.0
        self._foreign = foreign
        self._engine = engine
        self._accumulate = accumulate
        self._steps = steps
        self._timeout = timeout_seconds
        self._snapshot = Snapshot(engine.optimizer, foreign.table)
        self._nonfinite = NonFinitePolicy(TrainSection(), engine)
        self._passes = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=engine.device)

    def __call__(self, batch: Any) -> Any:
        """Runs the module: keywords from a mapping, arguments from a tuple or list, else one argument.

        Returns:
            The output's loss where it has one (`.loss`, or ["loss"] of a mapping), else the output.
        """
        try:
            if isinstance(batch, Mapping):
                output = self.module(**batch)
            else:
                output = self.module(*batch) if isinstance(batch, tuple | list) else self.module(batch)
        finally:
            self._engine.end_pass(0)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return output if loss is None else loss

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch's mean loss; over micro-batches and ranks the mean of those means counts."""
        if self._passes == 0:
            self._engine.begin_step()
        self._passes += 1
        last = self._passes == self._accumulate
        share = loss / (self._accumulate * self._engine.mesh.world.size)
        self._loss += share.detach()
        self._engine.begin_backward(0, last=last)
        torch.autograd.backward(share * self._engine.loss_scale.value)
        self._engine.gradients_arrived(0, last=last)
        self._engine.end_pass(0)

    def step(self) -> bool:
        """One optimizer step once `accumulate` micro-batches have gone backward; before that it does nothing.

        Returns:
            Whether parameters were updated; not where fp16 overflowed.

        Raises:
            TkError: the loss or the gradient norm is not finite.
        """
        if self._passes < self._accumulate:
            return False
        world = self._engine.mesh.world
        values = torch.stack([self._loss, self._engine.finish_backward()])
        loss, square_sum = all_reduce(values, world).tolist()
        self.last_grad_norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        updated = self._nonfinite.allows(self.step_count + 1, loss, self.last_grad_norm, self._loss)
        if updated:
            options = self._engine.optimizer.options
            self._engine.update(learning_rate(self.step_count, self._steps, options), self.last_grad_norm)
            self.step_count += 1
        self._passes = 0
        self._loss = torch.zeros_like(self._loss)
        return updated

    def save(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        """Commits a step in a run folder, as `tk train` does; every rank calls it. A Hugging Face model brings its
        config.json, so that the folder can be served.

        Args:
            keep: newest steps kept; 0 = all.

        Raises:
            CheckpointError: the step is there already, or another job writes there.
            TkError: the disk is full or fails.
        """
        run = Path(folder)
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
            timeout=self._timeout,
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
        opened = Checkpoint.open(Path(checkpoint))
        if "step" not in opened.resume:
            raise CheckpointError(f"{opened.path} holds weights only: there is nothing to resume.")
        self._snapshot.load(opened)
        self.step_count = self._engine.optimizer.step_count = int(opened.resume["step"])
        self._engine.loss_scale.restore(opened.resume.get("loss_scale"))


def _side_files(module: nn.Module) -> dict[str, bytes]:
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    return {"config.json": json.dumps(to_dict(), indent=2).encode()} if to_dict else {}
