"""Maps a DeepSpeed JSON configuration to settings of tk. A key that tk cannot carry out is refused by name."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final

from ....core.errors import ConfigError
from ....core.given_files import read_given_text
from .keys import DIRECT, FIXED, NEEDLESS, NOTED, REFUSED_SECTIONS, RULED, WITHOUT_SWITCH
from .offload import offload
from .rules import Given, Setting, batch, defaults, direct, optimizer, precision, scheduler

AUTO: Final = "auto"  # leaves the value to the TOML file
SECTIONS: Final = frozenset({*REFUSED_SECTIONS, *NOTED})  # accepted or refused as a whole


@dataclass(frozen=True, slots=True)
class Mapped:
    """The settings of a file.

    Attributes:
        settings: values for keys of tk.
        notes: sentences for the user about keys that tk does not need or carries out in another way.
    """

    settings: tuple[Setting, ...]
    notes: tuple[str, ...]


def read_deepspeed(path: Path) -> dict[str, Any]:
    """Reads the file.

    Raises:
        ConfigError: it cannot be read or is not a JSON object.
    """
    try:
        data = json.loads(read_given_text(path))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a JSON object ({{...}}), like DeepSpeed's ds_config.json.")
    return data


def map_deepspeed(data: Mapping[str, Any], where: str, dp: int, micro_batch_size: int) -> Mapped:
    """Maps the content of a file to settings and notes.

    Args:
        data: the content of the file.
        where: the file's name, for messages.
        dp: the number of data-parallel ranks, on which DeepSpeed's batch sizes depend.
        micro_batch_size: the TOML file's value, which counts if the JSON has none.

    Raises:
        ConfigError: lists every key that cannot be carried out, with an alternative for each.
    """
    given = _read(data)
    problems = [problem for key, value in given.values.items() if (problem := _problem(key, value))]
    settings: list[Setting] = []
    batches = partial(batch, dp=dp, micro_batch_size=micro_batch_size)
    for rule in (direct, precision, optimizer, scheduler, offload, batches):
        try:
            settings += rule(given)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        text = "; ".join(problems)
        raise ConfigError(f"{where}: {text}" + ("" if text.endswith("?") else "."))
    return Mapped((*settings, *defaults(given, settings)), tuple(_notes(given)))


def _read(data: Mapping[str, Any]) -> Given:
    """Separates the values of a file from the keys that are "auto"."""
    flat = dict(_flatten(data))
    if flat.get("fp16.enabled", False) is False:  # then the other keys of its section have no effect
        flat = {key: value for key, value in flat.items() if key == "fp16.enabled" or not key.startswith("fp16.")}
    left_open = frozenset(key for key, value in flat.items() if value == AUTO)
    return Given({key: value for key, value in flat.items() if key not in left_open}, left_open)


def merge(data: dict[str, Any], mapped: Mapped, toml: str, where: str) -> list[str]:
    """Adds settings to the content of the TOML file.

    Args:
        data: the content of the TOML file; it is changed in place.
        mapped: the settings of the JSON file.
        toml, where: the names of the TOML and the JSON file, for messages.

    Returns:
        One note that lists the defaults of DeepSpeed that are in effect because neither file has the key; or none.

    Raises:
        ConfigError: lists every key to which both files give different values.
    """
    conflicts, taken = [], []
    for setting in mapped.settings:
        section, key = setting.key.split(".")
        table = data.setdefault(section, {})
        if key not in table:
            table[key] = setting.value
            taken += [f"[{section}] {key} = {setting.value!r}"] if setting.absent else []
        elif table[key] != setting.value and not setting.absent:
            conflicts.append(
                f"{toml} has [{section}] {key} = {table[key]!r}, but {setting.source} of {where} sets it to "
                f"{setting.value!r}"
            )
    if conflicts:
        raise ConfigError("; ".join(conflicts) + '. For each, remove one of the two, or write "auto" in the JSON file.')
    return [f"DeepSpeed's defaults are used for keys that neither file has: {', '.join(taken)}"] if taken else []


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all values with their dotted keys; a section of SECTIONS is one value."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in SECTIONS:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _problem(key: str, value: Any) -> str:
    """Returns the reason why a key cannot be carried out; "" if it can."""
    if key in REFUSED_SECTIONS:
        return "" if _is_off(key, value) else f"{key} is not supported: {REFUSED_SECTIONS[key]}"
    if key in FIXED:
        allowed, instead = FIXED[key]
        return "" if value in allowed else f"{key} = {value!r} is not supported, only {allowed[0]!r}: {instead}"
    known = {*DIRECT, *RULED, *NEEDLESS, *NOTED}
    if key in known:
        return ""
    near = get_close_matches(key, {*known, *FIXED, *REFUSED_SECTIONS}, n=1)
    return f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _is_off(key: str, section: Any) -> bool:
    """Whether a section is switched off."""
    if not isinstance(section, Mapping):
        return not section
    if key in WITHOUT_SWITCH:
        return all(_is_off(key, value) for value in section.values())
    return section.get("enabled", False) in (False, AUTO)


def _notes(given: Given) -> Iterator[str]:
    """Yields notes on keys that tk carries out in another way, leaves to the TOML file, or does not need."""
    values = given.values
    if values.get("fp16.enabled") is True and values.get("fp16.hysteresis", 2) != 1:
        yield "fp16: every overflow halves the loss scale, as with hysteresis = 1"
    if values.get("optimizer.params.weight_decay"):
        yield "weight decay is for tensors with 2 or more dims only"
    if "scheduler.type" in values:
        linear = values.get("scheduler.params.warmup_type", "log") == "linear"
        if not linear and values["scheduler.type"] != "WarmupCosineLR":
            yield "warmup is linear, not logarithmic"
        if values.get("scheduler.params.warmup_min_lr") or values.get("scheduler.params.warmup_min_ratio"):
            yield "warmup begins at a learning rate of 0"
    if given.left_open:
        yield f'left to the TOML file ("auto"): {", ".join(sorted(given.left_open))}'
    for key in sorted(NOTED.keys() & values.keys()):
        if values[key] and not (isinstance(values[key], Mapping) and values[key].get("enabled") is False):
            yield f"{key} has no effect: {NOTED[key]}"
    if needless := sorted(key for key in values if key in NEEDLESS):
        yield f"tk does not need: {', '.join(needless)}"
