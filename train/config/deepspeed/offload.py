"""The rule for DeepSpeed's offload sections, and for the keys that were in their place before them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ....core.errors import ConfigError
from .rules import Given, Setting, convert

_TIERS: Final[Mapping[object, str]] = MappingProxyType({"none": "none", "cpu": "cpu", "nvme": "disk"})
# DeepSpeed's section of a part -> the part of tk, and the old keys that are true for "cpu".
_PARTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {
        "offload_optimizer": ("offload.optimizer", ("cpu_offload",)),
        "offload_param": ("offload.parameters", ("cpu_offload_param", "cpu_offload_params")),
    }
)
_STAGE: Final = "zero_optimization.stage"
_ACTIVATIONS: Final = "activation_checkpointing.cpu_checkpointing"
# Keys of a section that is on, with the one value that tk carries out, and advice for those who need another value.
_WHOLE: Final[Mapping[str, tuple[object, str]]] = MappingProxyType(
    {
        "ratio": (1, "tk offloads the states of all parameters: raise the number of ranks that share them instead"),
        "super_offload": (False, "tk's update runs beside the next forward pass as it is; leave it out"),
    }
)


def offload(given: Given) -> list[Setting]:
    """Maps the places of states, gradients, parameters and activations, and the folder of what goes to a disk.

    DeepSpeed's gradients go where its optimizer's states are, which is then the default, since it has no key for them.
    """
    settings, folders = [], {}
    for section, (ours, old) in _PARTS.items():
        device, source = _device(given, f"zero_optimization.{section}", old)
        if source:
            settings.append(Setting(ours, _TIERS[device], source))
        if device == "none":
            continue
        _check(given, section, source)
        if section == "offload_optimizer":
            settings.append(Setting("offload.gradients", _TIERS[device], source, absent=True))
        path = f"zero_optimization.{section}.nvme_path"
        if device == "nvme" and given.values.get(path) is not None:
            folders[path] = _folder(path, given.values[path])
    if len(set(folders.values())) > 1:
        (first, path), (second, other) = folders.items()
        raise ConfigError(f"{first} = {path!r} and {second} = {other!r} differ; tk has one folder, [offload] folder")
    if _ACTIVATIONS in given.values:
        moves = convert(_ACTIVATIONS, given.values[_ACTIVATIONS], bool)
        settings.append(Setting("offload.activations", "cpu" if moves else "none", _ACTIVATIONS))
    return settings + [Setting("offload.folder", path, source) for source, path in list(folders.items())[:1]]


def _device(given: Given, section: str, old: tuple[str, ...]) -> tuple[object, str]:
    """Returns DeepSpeed's device of a part, "none" if no key names one, and the key that does."""
    values, found = given.values, {}
    if f"{section}.device" in values:
        found[f"{section}.device"] = values[f"{section}.device"]
    for name in old:
        key = f"zero_optimization.{name}"
        if key in values and convert(key, values[key], bool):
            found[key] = "cpu"
    for key, device in found.items():
        if not isinstance(device, str) or device not in _TIERS:
            raise ConfigError(f"{key} = {device!r} must be one of {', '.join(map(repr, _TIERS))}")
    if len(set(found.values())) > 1:
        raise ConfigError(f"{' and '.join(found)} name different devices; remove the older key")
    return next(((device, key) for key, device in found.items()), ("none", ""))


def _check(given: Given, section: str, source: str) -> None:
    """Raises ConfigError if a section that is on has a value that tk cannot carry out."""
    stage = given.values.get(_STAGE, 3)  # without a value, it is that of the TOML file
    if section == "offload_param" and stage != 3:
        raise ConfigError(f"{source} needs {_STAGE} = 3, not {stage!r}: below, every rank computes with all parameters")
    for name, (allowed, instead) in _WHOLE.items():
        key = f"zero_optimization.{section}.{name}"
        value = given.values.get(key, allowed)
        if value != allowed:
            raise ConfigError(f"{key} = {value!r} is not supported, only {allowed!r}: {instead}")


def _folder(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} = {value!r} must be the path of a folder")
    return value
