"""`[model] init`: a run's shape and tokenizer from a checkpoint (no torch, no processes)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.run.run_folder import RunFolder
from ...core.errors import CheckpointError, ConfigError, ManifestError
from ...model.stored_config import stored_config
from ...text.tokenizer import TOKENIZER_FILE
from .train_config import TrainConfig


def resolve(config: TrainConfig, resume: str) -> TrainConfig:
    """Returns the configuration with the shape of the checkpoint that `model.init` names.

    The tokenizer also comes from that checkpoint, unless `data.tokenizer` is set. A run that resumes reads both from
    the step that it resumes, so it needs init's folder no more. A configuration whose shape is known is returned as it
    is.

    Args:
        config: the configuration as it was read.
        resume: "auto", "never" or a checkpoint; see Trainer.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError: [train] seq_len is longer than the model allows.
    """
    if config.model.is_known:
        return config
    checkpoint = _initial_checkpoint(config, resume)
    shape = stored_config(checkpoint)
    if not shape.vocab_size:
        raise ManifestError(f"{checkpoint.path / 'config.json'} has no vocab_size. A model to train needs one.")
    if config.train.seq_len > shape.max_position_embeddings:
        raise ConfigError(
            f"train.seq_len = {config.train.seq_len} exceeds max_position_embeddings = "
            f"{shape.max_position_embeddings} of {checkpoint.path}. Use shorter sequences."
        )
    changes: dict[str, object] = {"model": config.model.with_shape(shape)}
    if not config.data.tokenizer and (checkpoint.path / TOKENIZER_FILE).is_file():
        changes["data"] = config.data.model_copy(update={"tokenizer": str(checkpoint.path)})
    return config.model_copy(update=changes)


def _initial_checkpoint(config: TrainConfig, resume: str) -> Checkpoint:
    """Returns the step that the run resumes if there is one, else the checkpoint of `model.init`."""
    if resume not in ("auto", "never"):
        return Checkpoint.open(Path(resume))
    own = RunFolder(config.run_folder).newest().checkpoint if resume == "auto" else None
    return own or open_init(config)


def unsupported_options(config: Mapping[str, Any]) -> list[str]:
    """Returns a note for each option of a checkpoint's config.json that changes training elsewhere and not in tk."""
    dropouts = [
        f"{key} = {value}"
        for key, value in config.items()
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, int | float) and value > 0
        if not key.startswith(("classifier", "summary"))  # dropout of heads that a language model lacks
    ]
    found = [f"{', '.join(dropouts)}: tk trains without dropout"] if dropouts else []
    if config.get("pad_token_id") is not None and config.get("model_type") != "gpt2":
        found.append(
            f"pad_token_id = {config['pad_token_id']}: transformers does not train that row of the embedding on input "
            "tokens; tk trains it like any other row"
        )
    return found


def open_init(config: TrainConfig) -> Checkpoint:
    """Opens the checkpoint that `model.init` names.

    Raises:
        CheckpointError: it cannot be used; the message names the key.
    """
    try:
        return Checkpoint.open(Path(config.model.init))
    except CheckpointError as error:
        raise type(error)(f"[model] init: {error}") from error
