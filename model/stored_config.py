"""The model configuration of a checkpoint: its config.json, corrected by its weights."""

import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from ..checkpoint.convert.tensor_values import equal_tensors
from ..checkpoint.read.reader import Checkpoint
from ..core.errors import CheckpointError, ShapeMismatch
from .config import ModelConfig
from .config_keys import unknown_keys, unquantized
from .registry import architectures, tensor_table
from .rope_keys import lost_theta

_log = logging.getLogger(__name__)
# The ends of the names of tensors that a model may lack, with the key that says so.
_TAKEN_OUT_BY: Final = MappingProxyType({"_proj.bias": "qkv_bias", "k_norm.weight": "use_qk_norm"})
_QUANTIZED = ("_scale", "_scale_inv", "_packed", ".absmax", ".quant_map", ".qweight", ".qzeros", ".scales", ".SCB")


def stored_config(checkpoint: Checkpoint) -> ModelConfig:
    """Returns the configuration of a checkpoint's model.

    If config.json ties the head to the embedding and the checkpoint stores both, the two are compared, as in
    `transformers`: if they differ, they are not tied.

    Raises:
        ManifestError: config.json describes a model that is not supported.
        ShapeMismatch: the checkpoint holds a tensor that this model does not have, a layer more for example: the model
            would be another one without it.
        CheckpointError: config.json does not exist, or the two tensors cannot be read; or it is an adapter, no model.
    """
    if checkpoint.manifest.adapter is not None:
        base = checkpoint.manifest.adapter.base.path
        raise CheckpointError(
            f"{checkpoint.path} holds an adapter, not a model: it belongs to its base{f', {base}' if base else ''}."
        )
    where = str(checkpoint.path / "config.json")
    data = checkpoint.config()
    config = ModelConfig.from_json(data, where)
    _warn(data, config.architecture, where)
    for spec in tensor_table(config):
        if stores_both(checkpoint, spec.name, spec.alias) and not equal_tensors(checkpoint, spec.name, spec.alias):
            _log.warning(
                "%s has tie_word_embeddings = true, but the checkpoint stores %s with other values than %s: the two "
                "are not tied.", where, spec.name, spec.alias,
            )  # fmt: skip
            config = config.model_copy(update={"tie_word_embeddings": False})
    unused = architectures()[config.architecture].unused(data, config.num_hidden_layers)
    _check_all_known(config, checkpoint, where, unused)
    return config


def _warn(data: Mapping[str, Any], name: str, where: str) -> None:
    """Logs the keys of config.json that may not have the effect that their writer expects."""
    architecture = architectures()[name]
    unknown = unknown_keys(data, architecture)
    if unknown:
        _log.warning("%s sets %s, which tk does not know and ignores.", where, ", ".join(unknown)[:200])
    lost = lost_theta(data, architecture.defaults["rope_theta"]) if "rope_theta" in architecture.options else ""
    if lost:
        _log.warning("%s: %s", where, lost)


def stores_both(checkpoint: Checkpoint, name: str, alias: str) -> bool:
    """Returns whether a checkpoint stores both a tied tensor and its original."""
    return all(tensor in checkpoint.tensors and tensor not in checkpoint.aliases for tensor in (name, alias))


def _check_all_known(config: ModelConfig, checkpoint: Checkpoint, where: str, unused: tuple[str, ...]) -> None:
    known = {name for spec in tensor_table(config) for name in (spec.name, spec.alias)}
    unknown = sorted(name for name in checkpoint.tensors.keys() - known if not name.startswith(unused))
    codes = [name for name in unknown if name.endswith(_QUANTIZED)]
    if codes:
        raise ShapeMismatch(f"{checkpoint.path} holds {codes[0]}, so its weights are quantized. {unquantized()}.")
    if unknown:
        architecture = architectures()[config.architecture]
        fields = (field for end, field in _TAKEN_OUT_BY.items() if unknown[0].endswith(end))
        field = next((each for each in fields if each in architecture.options), "num_hidden_layers")
        key = architecture.keys.get(field, (field,))[0]
        raise ShapeMismatch(
            f"{where} describes a model without {unknown[0]}, which the checkpoint holds ({len(unknown)} such "
            f"tensors in all). Correct config.json, {key} = {json.dumps(getattr(config, field))} for example, or "
            "remove these tensors from the weights."
        )
