"""An adapter's options as the keys of PEFT's adapter_config.json, and back."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from ...core.config import parse
from ...core.errors import CheckpointError, ConfigError
from .options import LoraOptions
from .peft_layers import LAYERS, PATTERN, targets_of

FAN_IN_FAN_OUT: Final = "fan_in_fan_out"  # whether the base's linear weights are stored [in, out]
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
# Keys that change nothing once an adapter is trained: they are about its start, its file, or one run of a program.
_IGNORED: Final = frozenset(
    {
        *("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core"),
        *("runtime_config", FAN_IN_FAN_OUT),
        *(LAYERS, PATTERN),  # which `targets_of` reads
    }
)
_TASKS: Final = (None, "CAUSAL_LM")
# Initial values after which peft changes the base, too, whenever it loads the adapter.
_CHANGES_BASE: Final = ("pissa", "corda", "olora", "mica", "loftq", "lora_ga")
_EMPTY: Final[tuple[object, ...]] = (None, False, "", [], {})


def to_peft(options: LoraOptions) -> dict[str, Any]:
    """Returns the options as PEFT's keys; what a reader cannot know from them is left out."""
    plain = options.model_dump(mode="json")
    return {"peft_type": "LORA", **{key: plain[ours] for key, ours in _KEYS.items()}}


def from_peft(config: Mapping[str, Any], where: str) -> LoraOptions:
    """Returns the options of an adapter_config.json, or of an adapter's record in a manifest.

    Targets of some layers (`layers_to_transform`) become a regular expression, since LoraOptions has no such key.

    Args:
        where: the file, for messages.

    Raises:
        CheckpointError: it is no LoRA adapter, or one with an option that tk does not build; or a value is not of its
            kind.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type = {config.get('peft_type')!r}, and tk has adapters of type 'LORA'.")
    _check_plain(config, where)
    found = {ours: config.get(key) for key, ours in _KEYS.items()}
    filled = {ours: _DEFAULTS.get(key) if found[ours] is None else found[ours] for key, ours in _KEYS.items()}
    filled["targets"] = targets_of(config, where)
    try:
        return parse(filled, LoraOptions, where)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _check_plain(config: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for an option that would make other products than W x + b + scale B A x."""
    if config.get("task_type") not in _TASKS:
        raise CheckpointError(f"{where}: task_type = {config['task_type']!r}, and tk has models of type 'CAUSAL_LM'.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights = {start!r}, with which peft changes the base as well. Save the adapter again "
            "with save_pretrained(path_initial_model_for_weight_conversion=...), which makes one for the base as it is."
        )
    for key, value in config.items():
        known = key in _KEYS or key in _IGNORED or key in ("task_type", "init_lora_weights")
        if not known and value not in _EMPTY:
            raise CheckpointError(
                f"{where}: {key} = {str(value)[:80]!r}, and tk builds adapters without it. Merge this one with peft "
                "(merge_and_unload, save_pretrained), or train it without the option."
            )
