"""`[model] init`: a run's shape and tokenizer from a checkpoint (no torch, no processes)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.run.run_folder import RunFolder
from ...core.dtypes import Precision, by_name
from ...core.errors import CheckpointError, ConfigError
from ...model.config import ModelConfig
from ...model.shape import ModelKeys
from ...model.stored_config import stored_config
from ...text.tokenizer_files import TOKENIZER_FILE
from .train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class GivenModel:
    """The model that a configuration gives, without the facts that only a tokenizer has.

    Attributes:
        keys: those of the section `[model]`, or the shape of the checkpoint that `model.init` names.
        tokenizer: the folder of the tokenizer; None for that of the first source of data.
    """

    keys: ModelKeys
    tokenizer: Path | None

    def complete(self, vocab_size: int, eos_token_id: Iterable[int], params: Precision) -> ModelConfig:
        """Returns the shape of the run's model.

        Args:
            vocab_size, eos_token_id: of the tokenizer; those among the keys count first.
            params: the number format of parameters.
        """
        keys = {name: getattr(self.keys, name) for name in ModelKeys.model_fields}
        filled = {
            "vocab_size": self.keys.vocab_size or vocab_size,
            "eos_token_id": self.keys.eos_token_id or tuple(sorted(eos_token_id)),
            "dtype": by_name(params).torch,
        }
        return ModelConfig(**keys | filled)


def resolve(config: TrainConfig, resume: str) -> GivenModel:
    """Returns the model that the configuration gives, by its own keys or by the checkpoint that `model.init` names.

    The tokenizer also comes from that checkpoint, unless `data.tokenizer` is set. A run that resumes reads both from
    the step that it resumes, so it needs init's folder no more.

    Args:
        config: the configuration.
        resume: "auto", "never" or a checkpoint; see Trainer.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError: [train] seq_len is longer than the model allows.
    """
    tokenizer = Path(config.data.tokenizer) if config.data.tokenizer else None
    if not config.model.init:
        return GivenModel(config.model, tokenizer)
    checkpoint = _initial_checkpoint(config, resume)
    shape = initial_shape(checkpoint)
    if config.train.seq_len > shape.context_length:
        raise ConfigError(
            f"train.seq_len = {config.train.seq_len} exceeds {shape.context_text} of {checkpoint.path}. Use shorter "
            "sequences."
        )
    if tokenizer is None and (checkpoint.path / TOKENIZER_FILE).is_file():
        tokenizer = checkpoint.path
    return GivenModel(shape, tokenizer)


def _initial_checkpoint(config: TrainConfig, resume: str) -> Checkpoint:
    """Returns the step that the run resumes if there is one, else the checkpoint of `model.init`."""
    if resume not in ("auto", "never"):
        return Checkpoint.open(Path(resume))
    own = RunFolder(config.run_folder).newest().checkpoint if resume == "auto" else None
    if own is not None:
        return own
    checkpoint = open_init(config)
    if checkpoint.manifest.adapter is not None:
        raise ConfigError(
            f"[model] init = {config.model.init!r} holds an adapter, not a model. To train it further, name it in "
            f"[lora] init, and its base in [model] init: {checkpoint.manifest.adapter.base.path or 'unknown'}."
        )
    return checkpoint


def initial_shape(checkpoint: Checkpoint) -> ModelConfig:
    """Returns the shape of a checkpoint's model; a step of an adapter's run has its base's."""
    if checkpoint.manifest.adapter is None:
        return stored_config(checkpoint)
    return ModelConfig.from_json(checkpoint.config(), str(checkpoint.path / "config.json"))


def unsupported_options(config: Mapping[str, Any]) -> list[str]:
    """Returns a note for each option of a checkpoint's config.json that changes training elsewhere and not in tk."""
    dropouts = [
        f"{key} = {value}"
        for key, value in config.items()
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, int | float) and value > 0
        if not key.startswith(("classifier", "summary"))  # dropout of heads that a language model lacks
    ]
    found = [f"{', '.join(dropouts)}: tk trains without dropout"] if dropouts else []
    jitter = config.get("router_jitter_noise")
    if isinstance(jitter, int | float) and jitter > 0:
        found.append(f"router_jitter_noise = {jitter}: tk trains without noise in the routers' input")
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
    assert config.model.init is not None
    try:
        return Checkpoint.open(Path(config.model.init))
    except CheckpointError as error:
        raise type(error)(f"[model] init: {error}") from error
