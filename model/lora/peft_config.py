"""An adapter's options as the keys of PEFT's adapter_config.json, and back."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from ...core.config import parse
from ...core.errors import CheckpointError, ConfigError
from .options import LoraOptions

# The keys that decide an adapter, with the names of LoraOptions, in the order in which they are written.
_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets",
        "exclude_modules": "exclude",
        "rank_pattern": "rank_pattern",
        "alpha_pattern": "alpha_pattern",
        "use_rslora": "rslora",
        "bias": "bias",
        "modules_to_save": "modules_to_save",
    }
)
# PEFT's values of keys that a file may lack or have as null.
_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "exclude_modules": [], "rank_pattern": {}, "alpha_pattern": {}}
    | {"use_rslora": False, "bias": "none", "modules_to_save": []}
)


def to_peft(options: LoraOptions) -> dict[str, Any]:
    """Returns the options as PEFT's keys; what a reader cannot know from them is left out."""
    plain = options.model_dump(mode="json")
    return {"peft_type": "LORA", **{key: plain[ours] for key, ours in _KEYS.items()}}


def from_peft(config: Mapping[str, Any], where: str) -> LoraOptions:
    """Returns the options of an adapter_config.json, or of an adapter's record in a manifest.

    Args:
        where: the file, for messages.

    Raises:
        CheckpointError: it is no LoRA adapter, or a value is not of its kind.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type = {config.get('peft_type')!r}, and tk has adapters of type 'LORA'.")
    found = {ours: config.get(key) for key, ours in _KEYS.items()}
    filled = {ours: _DEFAULTS.get(key) if found[ours] is None else found[ours] for key, ours in _KEYS.items()}
    try:
        return parse(filled, LoraOptions, where)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
