"""The run folder as training uses it: one writing job, committed steps, and what a resumed run starts from."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import Peers, open_together, told_to_all
from ...checkpoint.run.run_folder import LockedRun, RunFolder
from ...checkpoint.save.save_job import SaveJob
from ...core.errors import CheckpointError, ConfigError, TkError
from ...model.loading import peers
from ...model.stored_config import stored_config
from ...parallel.collectives import broadcast
from ...parallel.host import on_this_host
from ..config.initial_model import left_out, open_init
from ..config.train_config import param_groups
from ..launch.flight_recorder import is_echo
from .replica_check import ReplicaCheck
from .resume import Start
from .saver import Saver
from .snapshot import slot_dtypes

if TYPE_CHECKING:
    from ..trainer import Trainer


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands, free of any layout: what a checkpoint stores beside tensors."""

    step: int = 0
    tokens: int = 0
    samples: int = 0

    def advance(self, num_tokens: int, num_samples: int) -> "TrainState":
        """The state after one more step."""
        return TrainState(self.step + 1, self.tokens + num_tokens, self.samples + num_samples)


class RunState:
    """Loads and saves one trainer's run. `run` is the locked folder on rank 0, None elsewhere."""

    def __init__(self, trainer: "Trainer", run: LockedRun | None) -> None:
        self.trainer = trainer
        self.run = run
        number = int(run.attempt, 16) if run else 0
        self.attempt = f"{self._from_rank_0(number):08x}"
        self.saver = Saver(
            self._job(),
            trainer.snapshot,
            ReplicaCheck(trainer.snapshot, trainer.mesh.world),
            run.lock_fd if run else -1,
            trainer.config.checkpoint.async_save,
        )
        trainer.before_update = self.saver.settle

    @staticmethod
    @contextmanager
    def open(trainer: "Trainer") -> Iterator["RunState"]:
        """Takes the run folder's lock on rank 0 for as long as the context lasts; every rank enters.

        Raises:
            CheckpointError: another job writes there.
            TkError: on leaving, the last save failed.
        """
        if trainer.mesh.world.rank == 0:
            with RunFolder(trainer.config.run_folder).lock() as run, RunState(trainer, run)._finishing() as state:
                yield state
        else:
            with RunState(trainer, None)._finishing() as state:
                yield state

    @contextmanager
    def _finishing(self) -> Iterator["RunState"]:
        try:
            yield self
        except BaseException as error:
            self.saver.close(failed=True, alone=is_echo(error))
            raise
        self.saver.close(failed=False)

    def _from_rank_0(self, number: int) -> int:
        world, device = self.trainer.mesh.world, self.trainer.device
        return int(broadcast(torch.tensor(number, dtype=torch.int64, device=device), world))

    def load(self, resume: str, fork: bool) -> TrainState:
        """Fills the trainer from the checkpoint that `resume` means (see Trainer) and returns where that stands.

        Where there is none and `model.init` is given, weights come from there, and all else begins anew.

        Raises:
            CheckpointError: it cannot be used, or newer steps are in its way and `fork` was not asked for.
            ConfigError: the data is not what the checkpoint was trained on, or the folder's steps are in the way.
            StorageError: a file cannot be opened or read; nothing in the folder has moved.
        """
        world, options = self.trainer.mesh.world, self.trainer.config
        here = peers(on_this_host(world, options.parallel.timeout_seconds))  # they read together what they need
        everywhere = peers(world)
        fill = partial(self._fill, here=here, world=everywhere)
        start = Start(self.run, options.run_folder, fill, everywhere, self._from_rank_0)
        if resume not in ("auto", "never"):
            return start.from_given(Path(resume), fork)
        if resume == "never":
            start.anew()
        state = start.from_newest()
        if state is None and options.model.init:
            checkpoint = open_together(lambda: open_init(options), everywhere)
            with told_to_all(everywhere):
                for note in left_out(checkpoint.config()) if self.run else ():
                    print(f"{checkpoint.path / 'config.json'} has {note}", file=sys.stderr)
            with told_to_all(everywhere):
                self.trainer.snapshot.load_weights(checkpoint, here)
            self.trainer.snapshot.publish()
        return state or TrainState()

    def _fill(self, checkpoint: Checkpoint, here: Peers, world: Peers) -> TrainState:
        """Fills the trainer; every rank calls it, and raises what one of them meets.

        Args:
            here: the ranks of this machine.
        """
        with told_to_all(world):
            state = dict(checkpoint.resume)
            if not state:
                raise CheckpointError(f"{checkpoint.path} holds weights only: there is nothing to resume.")
            self._check_same_run(checkpoint, state)
        with told_to_all(world):
            self.trainer.snapshot.load(checkpoint, here)
        self.trainer.snapshot.publish()
        if self.run:
            steps = self.trainer.config.train.steps
            done = f"; train.steps = {steps} leaves nothing to do" if checkpoint.step >= steps else ""
            print(f"resuming from {checkpoint.path}{done}", file=sys.stderr)
        self.trainer.engine.optimizer.step_count = int(state["optimizer_step"])
        self.trainer.engine.loss_scale.restore(state.get("loss_scale"))
        return TrainState(int(state["step"]), int(state["tokens"]), int(state["samples"]))

    def _check_same_run(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """What decides the model and its data must be as it was; layout, precision and schedule may change."""
        inputs, seed = self.trainer.inputs, self.trainer.config.train.seed
        if state.get("data_fingerprint") != inputs.fingerprint:
            raise ConfigError(
                f"{checkpoint.path} was trained on other data (fingerprint {state.get('data_fingerprint')}, now "
                f"{inputs.fingerprint}): sources, seq_len and tokenizer must stay. Give the new run another folder."
            )
        if state.get("seed") != seed:
            raise ConfigError(
                f"{checkpoint.path} was trained with train.seed = {state.get('seed')}, which decides the rows' order; "
                f"it is {seed} now. Keep the seed, or give the new run another folder."
            )
        stored = stored_config(checkpoint).model_dump()
        for key, value in inputs.model.model_dump().items():
            if key != "dtype" and stored[key] != value:
                raise ConfigError(
                    f"{checkpoint.path} has model.{key} = {stored[key]!r}, and the configuration {value!r}: a run "
                    "continues with the model that it began with."
                )

    def save(self, state: TrainState, last: bool) -> None:
        """Every rank writes what it owns; rank 0 commits and prunes. In the background, unless it is the last.

        Raises:
            TkError: this save or the one before it failed (a full disk, say), or replicas have drifted (of a save in
                the background the next update says so).
        """
        trainer = self.trainer
        resume = asdict(state) | {
            "optimizer_step": trainer.engine.optimizer.step_count,
            "loss_scale": trainer.engine.loss_scale.to_json(),
            "seed": trainer.config.train.seed,
            "data_fingerprint": trainer.inputs.fingerprint,
        }
        try:
            self.saver.save(state.step, resume, last)
        except OSError as error:
            raise TkError(
                f"Step {state.step} cannot be saved in {trainer.config.run_folder}: {error} Steps committed before are "
                "whole; mend the cause, and the same command resumes from the newest."
            ) from error

    def _job(self) -> SaveJob:
        trainer, options = self.trainer, self.trainer.config
        return SaveJob(
            run=options.run_folder,
            attempt=self.attempt,
            writer=trainer.mesh.world.rank,
            table=trainer.table,
            layout=trainer.mesh.layout,
            slots=slot_dtypes(trainer.engine.optimizer),
            param_groups=param_groups(options.optimizer, trainer.table),
            side_files=trainer.inputs.side_files if self.run else {},
            keep=options.checkpoint.keep,
            keep_every=options.checkpoint.keep_every,
            timeout=options.parallel.timeout_seconds,
        )
