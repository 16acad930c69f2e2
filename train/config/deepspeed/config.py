"""A DeepSpeed JSON configuration as settings of ours: pure mapping; what tk has not is refused by name."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final

from ....core.errors import ConfigError
from .keys import DIRECT, FIXED, NEEDLESS, NOTED, REFUSED_SECTIONS, RULED, WITHOUT_SWITCH
from .rules import Given, Setting, batch, defaults, direct, optimizer, precision, scheduler

AUTO: Final = "auto"  # left to our own configuration
SECTIONS: Final = frozenset({*REFUSED_SECTIONS, *NOTED})  # judged as a whole


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a file asks for; `notes` say where tk does the like by itself, or otherwise."""

    settings: tuple[Setting, ...]
    notes: tuple[str, ...]


def read_deepspeed(path: Path) -> dict[str, Any]:
    """The file's content. Raises ConfigError if it is no JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, as DeepSpeed's ds_config.json does.")
    return data


def map_deepspeed(data: Mapping[str, Any], where: str, dp: int, micro_batch_size: int) -> Mapped:
    """Settings and notes.

    Args:
        where: names the file in messages.
        dp: data-parallel ranks, which DeepSpeed's three batch sizes depend on.
        micro_batch_size: of our configuration, for where the JSON leaves it open.

    Raises:
        ConfigError: lists every key that cannot be carried out, with what to do instead.
    """
    given = _read(data)
    problems = [problem for key, value in given.values.items() if (problem := _problem(key, value))]
    settings: list[Setting] = []
    for rule in (direct, precision, optimizer, scheduler, partial(batch, dp=dp, micro_batch_size=micro_batch_size)):
        try:
            settings += rule(given)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems) + ".")
    return Mapped((*settings, *defaults(given, settings)), tuple(_notes(given)))


def _read(data: Mapping[str, Any]) -> Given:
    flat = dict(_flatten(data))
    if flat.get("fp16.enabled", False) is False:  # then the rest of its section says nothing
        flat = {key: value for key, value in flat.items() if key == "fp16.enabled" or not key.startswith("fp16.")}
    left_open = frozenset(key for key, value in flat.items() if value == AUTO)
    return Given({key: value for key, value in flat.items() if key not in left_open}, left_open)


def merge(data: dict[str, Any], mapped: Mapped, toml: str, where: str) -> list[str]:
    """Lays settings into the content of the TOML file.

    Returns:
        A note of DeepSpeed's defaults that count, neither file having their keys; none where there are none.

    Raises:
        ConfigError: both files set a key, to different values; lists all of those.
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
                f"{toml} has [{section}] {key} = {table[key]!r}, and {where} has {setting.source}, which makes it "
                f"{setting.value!r}"
            )
    if conflicts:
        raise ConfigError("; ".join(conflicts) + '. Remove one of each, or write "auto" in the JSON.')
    return [f"DeepSpeed's defaults, which neither file changes: {', '.join(taken)}"] if taken else []


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of all values; a section that is judged as a whole stays one."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in SECTIONS:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _problem(key: str, value: Any) -> str:
    """Why a key cannot be carried out, "" if it can."""
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
    """Whether a section asks for nothing."""
    if not isinstance(section, Mapping):
        return not section
    if key in WITHOUT_SWITCH:
        return all(_is_off(key, value) for value in section.values())
    return section.get("enabled", False) in (False, AUTO) and section.get("device") in (None, "none", AUTO)


def _notes(given: Given) -> Iterator[str]:
    """What tk does otherwise, where that shows in the numbers; and what it needs no setting for."""
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
            yield "warmup begins at 0"
    if given.left_open:
        yield f'left to the TOML file ("auto"): {", ".join(sorted(given.left_open))}'
    for key in sorted(NOTED.keys() & values.keys()):
        if values[key] and not (isinstance(values[key], Mapping) and values[key].get("enabled") is False):
            yield f"{key} changes nothing here: {NOTED[key]}"
    if needless := sorted(key for key in values if key in NEEDLESS):
        yield f"not needed here: {', '.join(needless)}"
