"""The start of a run of `tk train`: from a step of its own, another checkpoint, or the weights of `[model] init`."""

import logging
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import Peers, open_together, share_errors
from ...core.errors import ConfigError
from ...model.peers import peers
from ...model.stored_config import stored_config
from ...parallel.host import host_group
from ..config.initial_model import open_init, unsupported_options
from ..config.run_inputs import Inputs
from ..config.train_config import TrainConfig
from ..saving.checkpointer import Checkpointer, OpenRun
from ..saving.resume import Start
from ..state.progress import TrainState
from ..state.stored_state import RunResume

_log = logging.getLogger(__name__)


def start_run(
    checkpointer: Checkpointer, run: OpenRun, config: TrainConfig, inputs: Inputs, resume: str, fork: bool
) -> TrainState:
    """Fills the model from the checkpoint that `resume` means (see Trainer); every rank calls it.

    If there is no checkpoint and `model.init` is set, the weights come from that one, and all else starts anew.

    Args:
        checkpointer: the rank's checkpointer.
        run: the open run folder.
        config: the run's configuration.
        inputs: the run's inputs.
        resume, fork: see Trainer.

    Returns:
        The state of the run at its start.

    Raises:
        CheckpointError: the checkpoint cannot be used, or newer steps exist and `fork` is False.
        ConfigError: the checkpoint was trained on other data, or the folder has steps and `resume` is "never".
        StorageError: a file cannot be opened or read; nothing in the folder was moved.
    """
    ranks = checkpointer.ranks
    readers = peers(host_group(checkpointer.mesh.world, config.parallel.timeout_seconds))
    resuming = _Resuming(checkpointer, config, inputs, readers)
    start = Start(run.locked, config.run_folder, resuming.load, ranks, checkpointer.from_rank_0)
    if resume not in ("auto", "never"):
        return start.from_given(Path(resume), fork)
    if resume == "never":
        start.anew()
    state = start.from_newest()
    if state is None and config.model.init:
        checkpoint = open_together(lambda: open_init(config), ranks)
        with share_errors(ranks):
            for note in unsupported_options(checkpoint.config()) if run.locked else ():
                _log.warning("%s has %s", checkpoint.path / "config.json", note)
        checkpointer.load_weights(checkpoint, readers)
    return state or TrainState()


@dataclass(frozen=True, slots=True)
class _Resuming:
    """Loads steps of the same run.

    Attributes:
        readers: the ranks of this machine.
    """

    checkpointer: Checkpointer
    config: TrainConfig
    inputs: Inputs
    readers: Peers

    def load(self, checkpoint: Checkpoint) -> TrainState:
        """Fills the model; every rank calls it, and all raise the error of one."""
        with share_errors(self.checkpointer.ranks):
            stored = RunResume.from_json(checkpoint.resume, str(checkpoint.path))
            self._check_same_run(checkpoint, stored)
        self.checkpointer.load(checkpoint, stored.optimizer_step, stored.loss_scale, self.readers)
        if self.checkpointer.mesh.world.rank == 0:
            steps = self.config.train.steps
            done = f"; train.steps = {steps} leaves nothing to do" if checkpoint.step >= steps else ""
            _log.info("resuming from %s%s", checkpoint.path, done)
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
        shape = stored_config(checkpoint).model_dump()
        for key, value in inputs.model.model_dump().items():
            if key != "dtype" and shape[key] != value:
                raise ConfigError(
                    f"{checkpoint.path} has model.{key} = {shape[key]!r}, and the configuration {value!r}: a run "
                    f"continues with the model that it began with. Keep {key}, or give the new run another folder."
                )
