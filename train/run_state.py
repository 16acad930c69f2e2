"""The run folder as training uses it: one writing job, committed steps, and what a resumed run starts from."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoint.commit import commit
from ..checkpoint.reader import Checkpoint
from ..checkpoint.run_folder import LockedRun, RunFolder, step_aside, step_name
from ..checkpoint.writer import write_part
from ..core.errors import CheckpointError, ConfigError
from ..parallel.collectives import broadcast
from .snapshot import slot_dtypes

if TYPE_CHECKING:
    from .trainer import Trainer


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
        self.folder = trainer.config.run_folder
        number = int(run.attempt, 16) if run else 0
        self.attempt = f"{self._from_rank_0(number):08x}"

    @staticmethod
    @contextmanager
    def open(trainer: "Trainer") -> Iterator["RunState"]:
        """Takes the run folder's lock on rank 0 for as long as the context lasts; every rank enters.

        Raises:
            CheckpointError: another job writes there.
        """
        if trainer.mesh.world.rank == 0:
            with RunFolder(trainer.config.run_folder).lock() as run:
                yield RunState(trainer, run)
        else:
            yield RunState(trainer, None)

    def _from_rank_0(self, number: int) -> int:
        world, device = self.trainer.mesh.world, self.trainer.device
        return int(broadcast(torch.tensor(number, dtype=torch.int64, device=device), world))

    def load(self, resume: str) -> TrainState:
        """Fills the trainer from the checkpoint that `resume` means (see Trainer) and returns where that stands.

        Raises:
            CheckpointError: it cannot be used.
            ConfigError: the data is not what the checkpoint was trained on, or the folder's steps are in the way.
        """
        checkpoint = self._newest(resume) if resume in ("auto", "never") else self._explicit(Path(resume))
        if checkpoint is None:
            return TrainState()
        if self.run:
            print(f"resuming from {checkpoint.path}", file=sys.stderr)
        state = dict(checkpoint.resume)
        if not state:
            raise CheckpointError(f"{checkpoint.path} holds weights only: there is nothing to resume.")
        fingerprint = self.trainer.inputs.fingerprint
        if state.get("data_fingerprint") != fingerprint:
            raise ConfigError(
                f"{checkpoint.path} was trained on other data (fingerprint {state.get('data_fingerprint')}, now "
                f"{fingerprint}): sources, seq_len, seed and tokenizer must stay. Give the new run another folder."
            )
        self.trainer.snapshot.load(checkpoint)
        self.trainer.optimizer.step_count = int(state["optimizer_step"])
        return TrainState(int(state["step"]), int(state["tokens"]), int(state["samples"]))

    def _newest(self, resume: str) -> Checkpoint | None:
        """The newest committed step, as rank 0 sees it."""
        step = -1
        if self.run:
            newest = self.run.newest()
            for reason in newest.skipped:
                print(reason, file=sys.stderr)
            if newest.checkpoint:
                step = newest.checkpoint.step
        step = self._from_rank_0(step)
        if step < 0:
            return None
        if resume == "never":
            raise ConfigError(
                f"{self.folder} holds step {step} of an earlier run and --resume never was asked for: use another "
                "[checkpoint] dir, or --resume auto."
            )
        return Checkpoint.open_step(self.folder / step_name(step))

    def _explicit(self, path: Path) -> Checkpoint:
        checkpoint = Checkpoint.open(path)
        newest = self._from_rank_0(self._newest_step() if self.run else 0)
        if checkpoint.path.resolve().parent == self.folder.resolve() and checkpoint.step < newest:
            raise CheckpointError(
                f"{self.folder} holds step {newest}, newer than {checkpoint.path.name} that you ask to resume: steps "
                "are never overwritten. Continue it in another [checkpoint] dir, or move the newer steps away."
            )
        return checkpoint

    def _newest_step(self) -> int:
        newest = RunFolder(self.folder).newest().checkpoint
        return newest.step if newest else -1

    def save(self, state: TrainState) -> None:
        """Every rank writes what it owns; rank 0 commits and prunes.

        Raises:
            CheckpointError: the step is there already, or a rank did not finish its part.
            OSError: the disk is full or fails.
        """
        trainer = self.trainer
        if self.run:
            self.run.begin_step(state.step)
        folder = step_aside(self.folder, state.step, self.attempt)
        dtypes = slot_dtypes(trainer.optimizer, trainer.dtype)
        entries = [
            (item, dtypes[item.slot], partial(trainer.snapshot.values, item))
            for item in trainer.snapshot.owned(trainer.mesh.world.rank)
        ]
        write_part(folder, trainer.mesh.world.rank, trainer.table, entries)
        if self.run:
            self._commit(self.run, folder, state, dtypes)

    def _commit(self, run: LockedRun, folder: Path, state: TrainState, dtypes: dict[str, str]) -> None:
        trainer, options = self.trainer, self.trainer.config
        commit(
            folder,
            trainer.table,
            trainer.mesh.layout,
            state.step,
            slots=dtypes,
            param_groups=_param_groups(trainer),
            resume=asdict(state)
            | {
                "optimizer_step": trainer.optimizer.step_count,
                "seed": options.train.seed,
                "data_fingerprint": trainer.inputs.fingerprint,
            },
            side_files=trainer.inputs.side_files,
            timeout=options.parallel.timeout_seconds,
        )
        if options.checkpoint.keep:
            run.prune(options.checkpoint.keep, options.checkpoint.keep_every)


def _param_groups(trainer: "Trainer") -> list[dict[str, object]]:
    options = trainer.config.optimizer
    stored = [spec for spec in trainer.table if not spec.alias]
    return [
        {
            "name": options.name,
            "lr": options.lr,
            "betas": list(options.betas),
            "eps": options.eps,
            "weight_decay": options.weight_decay if decay else 0.0,
            "params": [spec.name for spec in stored if (len(spec.shape) >= 2) == decay],
        }
        for decay in (True, False)
    ]
