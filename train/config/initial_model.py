"""`[model] init`: the shape and the tokenizer that a run begins with come from a checkpoint. No torch, no processes."""

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
    """The configuration with the shape, and where none is named the tokenizer, of the checkpoint behind `model.init`.

    A run that resumes takes both from the step it resumes instead: it does not need init's folder any more. Without
    init, and a second time, the configuration comes back as it is.

    Args:
        resume: see Trainer.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError: [train] seq_len is longer than the model allows.
    """
    if config.model.is_known:
        return config
    checkpoint = _begins_with(config, resume)
    shape = stored_config(checkpoint)
    if not shape.vocab_size:
        raise ManifestError(f"{checkpoint.path / 'config.json'} names no vocab_size.")
    if config.train.seq_len > shape.max_position_embeddings:
        raise ConfigError(
            f"train.seq_len = {config.train.seq_len} exceeds max_position_embeddings = "
            f"{shape.max_position_embeddings} of {checkpoint.path}."
        )
    changes: dict[str, object] = {"model": config.model.with_shape(shape)}
    if not config.data.tokenizer and (checkpoint.path / TOKENIZER_FILE).is_file():
        changes["data"] = config.data.model_copy(update={"tokenizer": str(checkpoint.path)})
    return config.model_copy(update=changes)


def _begins_with(config: TrainConfig, resume: str) -> Checkpoint:
    if resume not in ("auto", "never"):
        return Checkpoint.open(Path(resume))
    own = RunFolder(config.run_folder).newest().checkpoint if resume == "auto" else None
    return own or open_init(config)


def left_out(config: Mapping[str, Any]) -> list[str]:
    """What the config.json of a checkpoint asks of training and tk's model does not do, in words, by name."""
    dropouts = [
        f"{key} = {value}"
        for key, value in config.items()
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, int | float) and value > 0
        if not key.startswith(("classifier", "summary"))  # of heads that a language model lacks
    ]
    found = [f"{', '.join(dropouts)}: tk trains without dropout"] if dropouts else []
    if config.get("pad_token_id") is not None and config.get("model_type") != "gpt2":
        found.append(
            f"pad_token_id = {config['pad_token_id']}: transformers never changes that row of the embedding by what is "
            "read; tk learns it like any other"
        )
    return found


def open_init(config: TrainConfig) -> Checkpoint:
    """The checkpoint behind `model.init`; CheckpointError says that the key names none."""
    try:
        return Checkpoint.open(Path(config.model.init))
    except CheckpointError as error:
        raise type(error)(f"[model] init: {error}") from error
