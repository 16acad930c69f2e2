"""A checkpoint's model: its config.json, and where the weights beside it say otherwise, the weights."""

import logging
from typing import Final

from ..checkpoint.convert.diff import equal_tensors
from ..checkpoint.read.reader import Checkpoint
from .config import ModelConfig
from .registry import tensor_table

_LOG: Final = logging.getLogger(__name__)


def stored_config(checkpoint: Checkpoint) -> ModelConfig:
    """The shape of a checkpoint's model.

    Where config.json ties the head to the embedding and both are stored, they are compared, as `transformers` does:
    if they differ, they are not tied. Equal ones are read once.

    Raises:
        ManifestError: config.json describes what tk does not implement.
        CheckpointError: there is no config.json, or the two tensors cannot be read.
    """
    where = str(checkpoint.path / "config.json")
    config = ModelConfig.from_json(checkpoint.config(), where)
    for spec in tensor_table(config):
        if stored_apart(checkpoint, spec.name, spec.alias) and not equal_tensors(checkpoint, spec.name, spec.alias):
            _LOG.warning(
                "%s: %s is stored and is not %s, though tie_word_embeddings is true; they are not tied.",
                where, spec.name, spec.alias,
            )  # fmt: skip
            return config.model_copy(update={"tie_word_embeddings": False})
    return config


def stored_apart(checkpoint: Checkpoint, name: str, alias: str) -> bool:
    """Whether a checkpoint stores both a tied tensor and its original."""
    return all(tensor in checkpoint.tensors and tensor not in checkpoint.aliases for tensor in (name, alias))
