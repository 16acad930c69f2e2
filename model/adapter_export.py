"""Export of an adapter to peft: the configuration with which peft gives the same modules the same products."""

import logging
import os
from typing import Any

from ..checkpoint.convert.export_adapter import prepare_adapter_export
from ..checkpoint.convert.reshard import Prepared
from ..core.errors import ConfigError
from .config import ModelConfig
from .lora.peft_config import FAN_IN_FAN_OUT, to_peft
from .lora.table import is_factor, leaf
from .lora.targets import module_of, without_idle
from .registry import tensor_table
from .spec import DecoderSpec
from .stored_adapter import StoredAdapter

_log = logging.getLogger(__name__)


def prepare_peft_export(
    adapter: StoredAdapter, config: ModelConfig, target: str | os.PathLike[str], *, base: str = "", force: bool = False
) -> Prepared:
    """Plans the folder of an adapter for peft; `.run()` writes it.

    Args:
        adapter: a step of ours.
        config: the shape of its base.
        target: the new folder.
        base: the path or name of the base that the folder says; "" = the recorded one.
        force: whether to replace a checkpoint at `target`.

    Raises:
        ShapeMismatch: the adapter is none of this base.
        ConfigError: the source is a folder of peft already, or the target cannot be made.
    """
    source = adapter.checkpoint
    if source.folder.kind == "peft":
        raise ConfigError(
            f"{source.path} is a folder that peft wrote, so there is nothing to export. To join it with its base, use "
            "--merge."
        )
    spec = adapter.decoder(config)
    if any(tensor.expert is not None and tensor.name in spec.adapters for tensor in spec.table):
        _log.warning(
            "%s has adapters of experts. peft with transformers 5 knows those of some architectures only, and then no "
            "adapters of dense blocks with the same names of weights: compare its answers, or use --merge.",
            source.path,
        )
    keys = _peft_keys(adapter, config, spec) | {"base_model_name_or_path": base or adapter.base.path or None}
    return prepare_adapter_export(source, target, keys, {module_of(name) for name in spec.adapters}, force=force)


def explicit_targets(spec: DecoderSpec) -> list[str]:
    """Returns the modules with an adapter as PEFT's `target_modules`: by the ends of their names if those suffice."""
    adapted = {module_of(name) for name in spec.adapters}
    ends = {leaf(name) for name in spec.adapters}
    others = {module_of(tensor.name) for tensor in spec.table if not is_factor(tensor)} - adapted
    clash = any(name.rpartition(".")[2] in ends for name in others)
    return sorted(adapted if clash else ends)


def _peft_keys(adapter: StoredAdapter, config: ModelConfig, spec: DecoderSpec) -> dict[str, Any]:
    """Returns the keys of adapter_config.json but that of the base, with modules by name."""
    options = without_idle(tensor_table(config), adapter.options)
    return to_peft(options) | {
        "task_type": "CAUSAL_LM",
        "target_modules": explicit_targets(spec),
        "exclude_modules": None,
        "modules_to_save": list(options.modules_to_save) or None,
        FAN_IN_FAN_OUT: spec.transposed,
        "inference_mode": True,
        "init_lora_weights": True,
    }
