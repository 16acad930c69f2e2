"""The model configuration of a checkpoint: its config.json, corrected by its weights."""

import logging

from ..checkpoint.convert.tensor_values import equal_tensors
from ..checkpoint.read.reader import Checkpoint
from .config import ModelConfig
from .registry import tensor_table

_log = logging.getLogger(__name__)


def stored_config(checkpoint: Checkpoint) -> ModelConfig:
    """Returns the configuration of a checkpoint's model.

    If config.json ties the head to the embedding and the checkpoint stores both, the two are compared, as in
    `transformers`: if they differ, they are not tied.

    Raises:
        ManifestError: config.json describes a model that is not supported.
        CheckpointError: config.json does not exist, or the two tensors cannot be read.
    """
    where = str(checkpoint.path / "config.json")
    config = ModelConfig.from_json(checkpoint.config(), where)
    for spec in tensor_table(config):
        if stores_both(checkpoint, spec.name, spec.alias) and not equal_tensors(checkpoint, spec.name, spec.alias):
            _log.warning(
                "%s has tie_word_embeddings = true, but the checkpoint stores %s with other values than %s: the two "
                "are not tied.", where, spec.name, spec.alias,
            )  # fmt: skip
            return config.model_copy(update={"tie_word_embeddings": False})
    return config


def stores_both(checkpoint: Checkpoint, name: str, alias: str) -> bool:
    """Returns whether a checkpoint stores both a tied tensor and its original."""
    return all(tensor in checkpoint.tensors and tensor not in checkpoint.aliases for tensor in (name, alias))
