"""`initialize`: data parallelism with ZeRO, mixed precision and our checkpoints for any `torch.nn.Module`.

engine = initialize(model, {"lr": 3e-4}, zero=2, precision="bf16")
for batch in batches:
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    if engine.step_count % 100 == 0:
        engine.save("runs/mine")            # written while training goes on; later: engine.load("runs/mine")
engine.close()                              # waits for the last save
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Never, SupportsIndex

import torch
from torch import nn

from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import open_together, share_errors
from ...core.dtypes import Precision
from ...core.errors import ConfigError, TkError
from ...core.given_paths import as_path
from ..config.sections import OptimizerSection, TrainSection
from ..context.modes import Mode
from ..engine.lr_schedule import learning_rate
from ..engine.optimizer_step import OptimizerStep, StepSums
from ..engine.training_engine import TrainingEngine
from ..saving.checkpointer import Checkpointer, SaveOptions
from ..state.stored_state import ModuleResume
from .accumulation import Accumulation
from .buffers import PersistentBuffers
from .checks import note_dtypes
from .context_parallel import ContextParallel
from .model import ForeignModel, whole_state
from .options import InitializeOptions, Stage, optimizer_section
from .reached_keys import ReachedKeys
from .take_over import take_over
from .watch import ModuleWatch


def initialize(
    model: nn.Module,
    optimizer: Mapping[str, Any] | OptimizerSection | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    zero: Stage = 0,
    precision: Precision = "fp32",
    cp: int = 1,
    cp_mode: Mode | Literal["auto"] = "auto",
    accumulate: int = 1,
    steps: int = 0,
    shard_size: int = 0,
    bucket_size: int = 2**24,
    overlap: bool = True,
    offload: Mapping[str, Any] | None = None,
    gather_together: str | nn.Module | Sequence[str | nn.Module] = (),
    timeout_seconds: float = 600.0,
) -> "ModelEngine":
    """Takes over a module: its parameters move into flat buffers, gradients are exchanged during backward.

    Under torchrun (RANK and WORLD_SIZE set) every rank calls it with the same model; rank 0's values count. Of a model
    that was built inside of `on_meta`, rank 0 makes the values of an ordinary construction, parameter by parameter.

    Args:
        weights: a step, run or Hugging Face folder with the names of the module's state_dict. Each rank reads its share
            of the parameters, and no rank ever has them all; whole buffers, if the folder has them. The fp32 masters
            get all digits that are stored.
        model: any module of plain tensors. Its floating-point parameters become of `precision`, frozen ones too;
            buffers keep their dtype. Gradients that it has are forgotten.
        optimizer: keys of [optimizer] (docs/training/configuration.md); the schedule is constant unless given.
        cp, cp_mode: as in [parallel], for models of `transformers`: ranks of one RANK // cp share a batch's rows.
        accumulate: micro-batches per optimizer step, each with one call of `backward`.
        steps: optimizer steps in all, for schedules that end.
        offload: keys of [offload] (docs/training/configuration.md), for states on the host or on disk.
        gather_together: for ZeRO stage 3, blocks that ranks may call differently or not at all: modules, or names and
            patterns of names ("decoder.layers.*"). They are gathered whenever the model is called, not one by one.

    Raises:
        ConfigError: an argument is wrong, ranks do not agree, or the module could not be trained or saved as it is (see
            train/foreign/checks.py). Nothing was changed.
        CheckpointError: the folder of weights cannot be used, or is of another module: its message names the tensors
            that are missing, left over or of another shape, and nothing was changed. If it turns out to be damaged
            later, the module must be built anew.
        ParallelError: the layout is impossible.
    """
    settings = InitializeOptions.of(
        zero=zero,
        precision=precision,
        cp=cp,
        cp_mode=cp_mode,
        accumulate=accumulate,
        steps=steps,
        shard_size=shard_size,
        bucket_size=bucket_size,
        overlap=overlap,
        offload=dict(offload or {}),
        timeout_seconds=timeout_seconds,
    )
    options = optimizer_section(optimizer, steps)
    return ModelEngine(settings, *take_over(model, gather_together, options, settings, weights))


class ModelEngine:
    """A module in training. `engine(batch)` runs it, `engine.module` is the module itself.

    Attributes:
        module: the module itself.
        step_count: the number of optimizer steps.
        last_grad_norm: the gradient norm of the newest step, before clipping.
    """

    __slots__ = (
        *("module", "step_count", "last_grad_norm", "_foreign", "_training", "_settings", "_watch", "_buffers"),
        *("_checkpointer", "_optimizer_step", "_accumulation", "_half_loaded", "_context", "_reached", "__weakref__"),
    )

    def __init__(
        self,
        settings: InitializeOptions,
        foreign: ForeignModel,
        engine: TrainingEngine,
        context: ContextParallel | None,
    ) -> None:
        self._training = engine
        self._context = context
        self._half_loaded = ""  # the checkpoint of a load that failed after values were read
        self.module = foreign.module
        self.step_count = 0
        self.last_grad_norm = 0.0
        self._foreign = foreign
        self._settings = settings
        self._watch = ModuleWatch(foreign.module, foreign.table, engine.buffers)
        self._buffers = PersistentBuffers(foreign.module, foreign.table, engine.mesh.world)
        self._checkpointer = Checkpointer(engine, engine.mesh)
        self._optimizer_step = OptimizerStep(engine, TrainSection(), before_update=self._checkpointer.flush_pending)
        engine.optimizer.takes_written = True
        self._accumulation = Accumulation(engine, settings.accumulate)
        self._reached = ReachedKeys(foreign.adapter.names if foreign.adapter else {}, engine)

    @property
    def _engine(self) -> TrainingEngine:
        self._training.home.require()
        if self._half_loaded:
            raise TkError(
                f"engine.load of {self._half_loaded} failed, so this engine holds values of two states, and neither "
                "trains nor saves them. Load a good checkpoint first (engine.load)."
            )
        return self._training

    def __getattr__(self, name: str) -> Never:
        hint = ""
        if name in ("optimizer", "param_groups", "lr"):
            hint = " The learning rate follows the schedule in initialize's optimizer; the engine's AdamW is its own."
        elif name not in self.__slots__ and hasattr(self.module, name):
            hint = f" The module has it: engine.module.{name}."
        raise AttributeError(f"ModelEngine has no {name}.{hint}", name=name, obj=self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        raise ConfigError(
            "A training engine cannot be copied or pickled: its buffers belong to a job of ranks. Copy engine.module, "
            "or save with engine.save."
        )

    def __call__(self, batch: Any) -> Any:
        """Runs the module: keywords from a mapping, arguments from a tuple or list, else one argument.

        Returns:
            The output's loss if it has one (`.loss`, or ["loss"] of a mapping), else the output. With cp, see
            `ContextParallel.run`.
        """
        try:
            with self._engine.whole_pass(), self._training.saving(0):
                if self._context is not None:
                    return self._context.run(batch)
                if isinstance(batch, Mapping):
                    output = self.module(**batch)
                else:
                    output = self.module(*batch) if isinstance(batch, tuple | list) else self.module(batch)
        except RuntimeError as error:
            note_dtypes(error, batch, self._engine.buffers.dtype)
            raise
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return output if loss is None else loss

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Runs backward of one micro-batch's mean loss; the step's loss is the mean over micro-batches and ranks.

        Raises:
            ConfigError: `loss` is no scalar with a graph; a pass before failed and `zero_grad` was not called since; or
                `backward` was called `accumulate` times since the last step. Those gradients may be on their way to
                other ranks already, so that another one would be lost, or added while they are read (NCCL).
            TkError: at ZeRO stage 3, ranks called different parts of the model, or the graph is older than a step.
        """
        with nullcontext() if self._context is None else self._context.replaced_attention():
            self._accumulation.backward(loss, retain_graph)

    def step(self) -> bool:
        """Makes one optimizer step after `accumulate` calls of `backward`; does nothing before that.

        Returns:
            Whether parameters were updated; False also after an overflow of fp16.

        Raises:
            ConfigError: a backward pass failed, the module has other parameters than at the time of `initialize`, or
                the first step gives keys of an adapter no gradient (see `ReachedKeys`).
            TkError: the loss or the gradient norm is not finite, or another rank discarded its gradients.
        """
        self._engine.refuse_while_whole("step()")
        self._accumulation.check()
        if not self._accumulation.complete:
            return False
        try:
            self._watch.check()
        except ConfigError:
            self.zero_grad()  # with the other ranks, which wait for this one's part of the exchange
            raise
        loss, sums, discarded = self._end_step(discard=False)
        if discarded:
            raise TkError(
                f"Nothing was updated: {discarded} of {self._engine.mesh.world.size} ranks discarded the step's "
                "gradients (engine.zero_grad()), and so they are discarded here. The next backward begins it again."
            )
        self._reached.check()
        self.last_grad_norm = sums.grad_norm
        optimizer = self._engine.optimizer
        lr = learning_rate(optimizer.step_count, self._settings.steps, optimizer.options)
        updated = self._optimizer_step.update(self.step_count + 1, sums, loss, lr)
        if updated:
            self._engine.outdate_graphs()
        self.step_count += updated
        return updated

    def zero_grad(self) -> None:
        """Discards the gradients since the last step, those of a backward pass that failed included.

        Every rank calls it, or gets an error from its `step`. Without such gradients it does nothing: a step leaves
        none.

        Raises:
            TkError: at ZeRO stage 3, the ranks failed at different places; the job must be started again.
        """
        self._engine.refuse_while_whole("zero_grad()")
        self._discard()

    def _discard(self) -> None:
        if self._accumulation.passes:
            self._accumulation.exchange_the_rest()
            self._end_step(discard=True)

    def _end_step(self, *, discard: bool) -> tuple[torch.Tensor, StepSums, int]:
        """Ends the step on all ranks; returns this rank's loss, the sums, and the number of ranks that discard it."""
        self._engine.meet_for_update()
        loss = self._accumulation.end()  # an error below ends this step, too
        sums = self._optimizer_step.agree(loss, self._buffers.changed(self._engine.device), float(discard))
        changed, discarded = sums.others
        if changed:
            self._buffers.agree()
        return loss, sums, int(discarded)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Holds all parameters of `module` whole inside the block, where they may be read and changed.

        Every rank enters it and makes the same changes, which persist. No step can be made inside.
        """
        with self._engine.whole_parameters():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns `module.state_dict()` with whole tensors, copied to the CPU; every rank calls it and gets the same.

        At ZeRO stage 3 one part of the model is whole at a time. `save` stores optimizer states too.
        """
        return whole_state(self.module, self._engine)

    def save(self, folder: str | os.PathLike[str], keep: int = 2, *, wait: bool = False) -> None:
        """Saves a step in a run folder, as `tk train` does; every rank calls it.

        The config.json of a Hugging Face model is saved too, so that the folder can be served.

        The call returns once replicas are compared and this rank's share is copied. The copy is written while training
        goes on, and the run folder is locked until the step is committed. The next save or load, `close` and the end of
        the interpreter wait for that.

        Args:
            folder: the run folder.
            keep: the number of newest steps that are kept; 0 = all.
            wait: whether the call returns only once the step is committed; then no copy is made.

        Raises:
            CheckpointError: the step exists already, or another job writes in the folder.
            ConfigError: the path is empty; or the module has other parameters or buffers than at the time of
                `initialize`.
            TkError: replicas differ, or this save (with `wait`) or the one before it failed.
        """
        self._watch.check()
        self._watch.check_names()
        self._engine.optimizer.take_written_values()
        self._buffers.agree()
        self._reached.warn()
        engine, foreign, timeout = self._engine, self._foreign, self._settings.timeout_seconds
        files = foreign.side_files() if engine.mesh.world.rank == 0 else {}
        options = SaveOptions(as_path(folder), keep, timeout=timeout, side_files=files, adapter=foreign.record)
        resume = ModuleResume(self.step_count, engine.optimizer.step_count, engine.loss_scale.state).to_json()
        self._checkpointer.save_alone(options, self.step_count, resume, wait=wait)

    def close(self) -> None:
        """Waits for the save in flight: then this rank's part of it is durable and, on rank 0, the step is committed.
        Training may go on afterwards.

        Raises:
            TkError: the save failed.
        """
        self._checkpointer.finish_save()

    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Continues from a checkpoint that any number of ranks and any ZeRO stage wrote; every rank calls it.

        Gradients since the last step are discarded. If the call fails once values are read, as of a damaged file, the
        engine does nothing until another call succeeds.

        Raises:
            CheckpointError: the checkpoint holds weights only, or cannot be used.
            TkError: the save before this call failed.
        """
        self._training.home.require()
        self._training.refuse_while_whole("load()")
        ranks = self._checkpointer.ranks
        with share_errors(ranks):
            self._checkpointer.finish_save()
        opened = open_together(lambda: Checkpoint.open(checkpoint), ranks)
        with share_errors(ranks):
            self._watch.check()
            resume = ModuleResume.from_json(opened.resume, str(opened.path))
            self._foreign.check_adapter(opened)
            self._watch.check_stored(opened)
        self._discard()
        self._half_loaded = str(opened.path)
        self._checkpointer.load(opened, resume.optimizer_step, resume.loss_scale)
        self._half_loaded = ""
        self._engine.outdate_graphs()
        self.step_count = resume.step
        self._buffers.agree()
