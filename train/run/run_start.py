"""The start of a run of `tk train`: from a step of its own, another checkpoint, or the weights of `[model] init`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import Peers, open_together, share_errors
from ...core.errors import ConfigError
from ...model.decoder import Decoder
from ...model.peers import peers
from ...parallel.host import host_group
from ..config.initial_model import initial_shape, open_init, unsupported_options
from ..config.run_inputs import Inputs
from ..config.train_config import TrainConfig
from ..records.run_events import report_start
from ..records.run_settings import changes_since, write_settings
from ..saving.checkpointer import Checkpointer, OpenRun
from ..saving.resume import Start
from ..state.progress import TrainState
from ..state.stored_state import RunResume
from .adapter_base import AdapterBase

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of one run on one rank; every rank calls the same methods.

    Attributes:
        checkpointer: the rank's checkpointer.
        run: the open run folder.
        config: the run's configuration.
        inputs: the run's inputs.
        base: the base of the adapter that the run trains; None if it trains a model.
        decoders: the rank's stages, if there is a base.
    """

    checkpointer: Checkpointer
    run: OpenRun
    config: TrainConfig
    inputs: Inputs
    base: AdapterBase | None = None
    decoders: Sequence[Decoder] = ()

    def begin(self, resume: str, fork: bool) -> TrainState:
        """Fills the model from the checkpoint that `resume` means, and returns the state of the run at its start.

        If there is no checkpoint and `model.init` is set, the weights come from that one, and all else starts anew.
        The weights of an adapter's base always come from there.

        Args:
            resume, fork: see Trainer.

        Raises:
            CheckpointError: the checkpoint cannot be used, or newer steps exist and `fork` is False.
            ConfigError: the checkpoint was trained on other data, or the folder has steps and `resume` is "never".
            StorageError: a file cannot be opened or read; nothing in the folder was moved.
        """
        checkpointer, config = self.checkpointer, self.config
        readers = peers(host_group(checkpointer.mesh.world, config.parallel.timeout_seconds))
        start = Start(
            self.run.locked,
            config.run_folder,
            partial(self._resume, readers),
            checkpointer.ranks,
            checkpointer.from_rank_0,
        )
        if self.base is not None:
            self.base.load(checkpointer, self.decoders, readers)
        state = self._loaded(start, resume, fork)
        if state is None:
            self._first_weights(readers)
        with share_errors(checkpointer.ranks):
            if self.run.locked:
                write_settings(config, self.run.attempt)
        return state or TrainState()

    def _loaded(self, start: Start[TrainState], resume: str, fork: bool) -> TrainState | None:
        """Loads the checkpoint that `resume` means; returns None if there is none."""
        if resume not in ("auto", "never"):
            return start.from_given(Path(resume), fork)
        if resume == "never":
            start.anew()
        return start.from_newest()

    def _first_weights(self, readers: Peers) -> None:
        """Fills what a run begins with, if that is stored: an adapter, or a model that is trained whole."""
        ranks, config = self.checkpointer.ranks, self.config
        if self.base is not None:
            if config.lora is not None and config.lora.init:
                path = Path(config.lora.init)
                self.base.load_adapter(open_together(lambda: Checkpoint.open(path), ranks), self.checkpointer, readers)
            return
        if config.model.init:
            checkpoint = open_together(lambda: open_init(config), ranks)
            with share_errors(ranks):
                for note in unsupported_options(checkpoint.config()) if self.run.locked else ():
                    _log.warning("%s has %s", checkpoint.path / "config.json", note)
            self.checkpointer.load_weights(checkpoint, readers)

    def _resume(self, readers: Peers, checkpoint: Checkpoint) -> TrainState:
        """Fills the model from a step of the same run; all ranks raise the error of one."""
        with share_errors(self.checkpointer.ranks):
            stored = RunResume.from_json(checkpoint.resume, str(checkpoint.path))
            self._check_same_run(checkpoint, stored)
        self.checkpointer.load(checkpoint, stored.optimizer_step, stored.loss_scale, readers)
        if self.checkpointer.mesh.world.rank == 0:
            changes = changes_since(checkpoint.path.parent, self.config)
            report_start(str(checkpoint.path), checkpoint.step, changes, self.config.train.steps)
        return stored.state

    def _check_same_run(self, checkpoint: Checkpoint, stored: RunResume) -> None:
        """Checks that model and data are those of the checkpoint; layout, precision and schedule may change."""
        inputs, seed = self.inputs, self.config.train.seed
        if stored.data_fingerprint != inputs.fingerprint:
            raise ConfigError(
                f"{checkpoint.path} was trained on other data (fingerprint {stored.data_fingerprint}, now "
                f"{inputs.fingerprint}): sources, seq_len and tokenizer must stay. Give the new run another folder."
            )
        if stored.seed != seed:
            raise ConfigError(
                f"{checkpoint.path} was trained with train.seed = {stored.seed}, which decides the rows' order; "
                f"it is {seed} now. Keep the seed, or give the new run another folder."
            )
        self._check_same_kind(checkpoint)
        shape = initial_shape(checkpoint).model_dump()
        for key, value in inputs.model.model_dump().items():
            if key != "dtype" and shape[key] != value:
                raise ConfigError(
                    f"{checkpoint.path} has model.{key} = {shape[key]!r}, and the configuration {value!r}: a run "
                    f"continues with the model that it began with. Keep {key}, or give the new run another folder."
                )

    def _check_same_kind(self, checkpoint: Checkpoint) -> None:
        if self.base is not None:
            if checkpoint.manifest.adapter is None:
                raise ConfigError(
                    f"{checkpoint.path} holds a model, and [lora] trains an adapter: give the adapter's run another "
                    "folder, and name the model in [model] init."
                )
            self.base.check(checkpoint)
        elif checkpoint.manifest.adapter is not None:
            raise ConfigError(
                f"{checkpoint.path} holds an adapter, and the configuration has no [lora]: it would train the whole "
                "model. Add the section [lora] of that run, or give the new run another folder."
            )
