"""A DeepSpeed JSON configuration as settings of ours: pure mapping; what tk has not is refused by name."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from ...core.errors import ConfigError
from .keys import DIRECT, FIXED, NEEDLESS, REFUSED_SECTIONS, RULED

AUTO: Final = "auto"  # left to our own configuration
BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SCHEDULES: Final = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_COS_MIN_RATIO: Final = 1e-4  # DeepSpeed's default


@dataclass(frozen=True, slots=True)
class Setting:
    """One value for a key of ours ("zero.stage"), and the key of the JSON that it came from."""

    key: str
    value: Any
    source: str


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
    values = {key: value for key, value in _flatten(data) if value != AUTO}
    problems = [problem for key, value in values.items() if (problem := _problem(key, value))]
    settings: list[Setting] = []
    for rule in (_direct, _precision, _optimizer, _scheduler):
        try:
            settings += rule(values)
        except ConfigError as error:
            problems.append(str(error))
    try:
        settings += _batch(values, dp, micro_batch_size)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems) + ".")
    return Mapped(tuple(settings), tuple(_notes(values)))


def merge(data: dict[str, Any], mapped: Mapped, toml: str, where: str) -> None:
    """Lays settings into the content of the TOML file.

    Raises:
        ConfigError: both files set a key, to different values; lists all of those.
    """
    conflicts = []
    for setting in mapped.settings:
        section, key = setting.key.split(".")
        table = data.setdefault(section, {})
        if key in table and table[key] != setting.value:
            conflicts.append(
                f"{toml} has [{section}] {key} = {table[key]!r}, and {where} has {setting.source}, which makes it "
                f"{setting.value!r}"
            )
        table[key] = setting.value
    if conflicts:
        raise ConfigError("; ".join(conflicts) + '. Remove one of each, or write "auto" in the JSON.')


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of all values; a section that is refused as a whole stays one."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in REFUSED_SECTIONS:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _problem(key: str, value: Any) -> str:
    """Why a key cannot be carried out, "" if it can."""
    if key in REFUSED_SECTIONS:
        off = not value or (isinstance(value, Mapping) and _is_off(value))
        return "" if off else f"{key} is not supported: {REFUSED_SECTIONS[key]}"
    if key in FIXED:
        allowed, instead = FIXED[key]
        return "" if value in allowed else f"{key} = {value!r} is not supported, only {allowed[0]!r}: {instead}"
    known = {*DIRECT, *RULED, *NEEDLESS}
    if key in known:
        return ""
    near = get_close_matches(key, {*known, *FIXED, *REFUSED_SECTIONS}, n=1)
    return f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _is_off(section: Mapping[str, Any]) -> bool:
    device = section.get("device", "")
    return section.get("enabled") is False or device in ("none", None) or not any(section.values())


def _direct(values: Mapping[str, Any]) -> list[Setting]:
    return [
        Setting(ours, _convert(source, values[source], kind), source)
        for source, (ours, kind) in DIRECT.items()
        if source in values
    ]


def _convert(source: str, value: Any, kind: type) -> Any:
    """A JSON value as `kind`; 5e8 is a whole number too."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and number and float(value).is_integer():
        return int(value)
    if kind is float and number:
        return float(value)
    if kind in (bool, list) and isinstance(value, kind):
        return value
    name = {int: "a whole number", float: "a number", bool: "true or false", list: "an array"}[kind]
    raise ConfigError(f"{source} = {value!r} must be {name}")


def _precision(values: Mapping[str, Any]) -> list[Setting]:
    enabled = {key: values[key] for key in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled") if key in values}
    chosen = [key for key, value in enabled.items() if value is True]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are both true: choose one")
    settings = []
    if chosen:
        settings.append(Setting("precision.params", "fp16" if chosen[0] == "fp16.enabled" else "bf16", chosen[0]))
    elif enabled:
        settings.append(Setting("precision.params", "fp32", f"{next(iter(enabled))} = false"))
    power = "fp16.initial_scale_power"
    if power in values:
        scale = 2.0 ** _convert(power, values[power], int)
        settings.append(Setting("precision.initial_loss_scale", scale, power))
    return settings


def _optimizer(values: Mapping[str, Any]) -> list[Setting]:
    kind = values.get("optimizer.type")
    if kind is None:
        return []
    if str(kind).lower() not in ("adam", "adamw"):
        raise ConfigError(f"optimizer.type = {kind!r} is not supported: tk has AdamW (Adam here means the same)")
    return [Setting("optimizer.name", "adamw", "optimizer.type")]


def _scheduler(values: Mapping[str, Any]) -> list[Setting]:
    kind, prefix = values.get("scheduler.type"), "scheduler.params."
    if kind is None:
        return []
    if kind not in _SCHEDULES:
        raise ConfigError(f"scheduler.type = {kind!r} is not supported: tk maps {', '.join(_SCHEDULES)}")
    settings = [Setting("optimizer.schedule", _SCHEDULES[kind], "scheduler.type")]
    for name, ours, convert in (
        ("warmup_num_steps", "optimizer.warmup_steps", int),
        ("warmup_max_lr", "optimizer.lr", float),
        ("total_num_steps", "train.steps", int),
    ):
        if prefix + name in values:
            settings.append(Setting(ours, _convert(prefix + name, values[prefix + name], convert), prefix + name))
    peak, base = values.get(prefix + "warmup_max_lr"), values.get("optimizer.params.lr")
    if None not in (peak, base) and peak != base:
        raise ConfigError(f"{prefix}warmup_max_lr = {peak} and optimizer.params.lr = {base} are one peak rate in tk")
    if kind == "WarmupDecayLR":
        settings.append(Setting("optimizer.min_lr_ratio", 0.0, "scheduler.type"))
    if kind == "WarmupCosineLR":
        ratio = float(values.get(prefix + "cos_min_ratio", _COS_MIN_RATIO))
        settings.append(Setting("optimizer.min_lr_ratio", ratio, prefix + "cos_min_ratio"))
    return settings


def _batch(values: Mapping[str, Any], dp: int, micro_batch_size: int) -> list[Setting]:
    """Our two batch sizes from DeepSpeed's three, of which two decide the third."""
    total, micro, steps = (_convert(key, values[key], int) if key in values else None for key in BATCH_KEYS)
    for key, value in zip(BATCH_KEYS, (total, micro, steps), strict=True):
        if value is not None and value < 1:
            raise ConfigError(f"{key} = {value} must be 1 or more")
    origin = "train_micro_batch_size_per_gpu"
    if micro is None:
        if total is not None and steps is not None and total % (steps * dp) == 0:
            micro = total // (steps * dp)
        else:
            micro, origin = micro_batch_size, "[train] micro_batch_size of the TOML"
    if total is None and steps is not None:
        total = micro * steps * dp
    if total is not None and steps is not None and total != micro * steps * dp:
        raise ConfigError(_unequal(total, micro, steps, dp, origin))
    settings = [Setting("train.micro_batch_size", micro, BATCH_KEYS[1])] if origin == BATCH_KEYS[1] else []
    if total is not None:
        settings.append(Setting("train.global_batch_size", total, BATCH_KEYS[0] if BATCH_KEYS[0] in values else origin))
    return settings


def _unequal(total: int, micro: int, steps: int, dp: int, origin: str) -> str:
    fixes = [f"train_batch_size = {micro * steps * dp}"]
    if total % (micro * dp) == 0:
        fixes.append(f"gradient_accumulation_steps = {total // (micro * dp)}")
    if total % (steps * dp) == 0:
        fixes.append(f"a micro-batch of {total // (steps * dp)}")
    if total % (micro * steps) == 0:
        fixes.append(f"dp = {total // (micro * steps)}")
    return (
        f"train_batch_size = {total} must be micro-batch x gradient_accumulation_steps x dp = {micro} x {steps} x {dp} "
        f"= {micro * steps * dp}, where the micro-batch is {origin}, and dp is the number of ranks / (tp x pp), from "
        f"--nproc, torchrun or [parallel] dp. Any of these fits: {', '.join(fixes)}; or leave one "
        "of the three out, and it is worked out"
    )


def _notes(values: Mapping[str, Any]) -> Iterator[str]:
    """What tk does otherwise, where that shows in the numbers; and what it needs no setting for."""
    if values.get("fp16.enabled") is True and values.get("fp16.hysteresis", 2) != 1:
        yield "fp16: every overflow halves the loss scale, as with hysteresis = 1"
    if "optimizer.params.weight_decay" in values:
        yield "weight decay is for tensors with 2 or more dims only"
    if "scheduler.type" in values:
        if (
            values.get("scheduler.params.warmup_type", "log") != "linear"
            and values["scheduler.type"] != "WarmupCosineLR"
        ):
            yield "warmup is linear, not logarithmic"
        if values.get("scheduler.params.warmup_min_lr") or values.get("scheduler.params.warmup_min_ratio"):
            yield "warmup begins at 0"
    if needless := sorted(key for key in values if key in NEEDLESS):
        yield f"not needed here: {', '.join(needless)}"
