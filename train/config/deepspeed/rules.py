"""From the values of a DeepSpeed JSON to settings of ours, one rule per subject. Pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ....core.errors import ConfigError
from .keys import DEFAULTS, DIRECT

BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SCHEDULES: Final = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# DeepSpeed's defaults.
_COS_MIN_RATIO: Final = 1e-4
_WARMUP_STEPS: Final = 1000
_WARMUP_MAX_LR: Final = 1e-3
_TORCH_ADAMW_DECAY: Final = 0.01


@dataclass(frozen=True, slots=True)
class Setting:
    """One value for a key of ours ("zero.stage"), and the key of the JSON that it came from.

    Attributes:
        absent: the JSON does not have that key: the value is DeepSpeed's default, and gives way to one in the TOML.
    """

    key: str
    value: Any
    source: str
    absent: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """What a file says.

    Attributes:
        values: by dotted key, those that are "auto" left out.
        left_open: dotted keys that are "auto".
    """

    values: Mapping[str, Any]
    left_open: frozenset[str] = frozenset()

    def lacks(self, key: str) -> bool:
        """Whether the key is absent, neither given nor "auto" by itself or with its section."""
        parts = key.split(".")
        names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return key not in self.values and not names & self.left_open


def direct(given: Given) -> list[Setting]:
    """What both configurations have."""
    values = given.values
    settings = [
        Setting(ours, convert(source, values[source], kind), source)
        for source, (ours, kind) in DIRECT.items()
        if source in values
    ]
    key = "zero_optimization.mics_shard_size"
    if key in values:
        settings.append(Setting("zero.shard_size", max(0, convert(key, values[key], int)), key))  # -1: off
    return settings


def convert(source: str, value: Any, kind: type) -> Any:
    """A JSON value as `kind`; 5e8 is a whole number too. Raises ConfigError if it is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and number and float(value).is_integer():
        return int(value)
    if kind is float and number:
        return float(value)
    if kind in (bool, list) and isinstance(value, kind):
        return value
    name = {int: "a whole number", float: "a number", bool: "true or false", list: "an array"}[kind]
    raise ConfigError(f"{source} = {value!r} must be {name}")


def precision(given: Given) -> list[Setting]:
    """The dtype of parameters, and the first loss scale."""
    values = given.values
    enabled = {key: values[key] for key in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled") if key in values}
    chosen = [key for key, value in enabled.items() if convert(key, value, bool)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are both true: choose one")
    settings = []
    if chosen:
        settings.append(Setting("precision.params", "fp16" if chosen[0] == "fp16.enabled" else "bf16", chosen[0]))
    elif enabled:
        settings.append(Setting("precision.params", "fp32", f"{next(iter(enabled))} = false"))
    power = "fp16.initial_scale_power"
    if power in values:
        scale = 2.0 ** convert(power, values[power], int)
        settings.append(Setting("precision.initial_loss_scale", scale, power))
    return settings


def optimizer(given: Given) -> list[Setting]:
    """AdamW, also under the name of Adam: DeepSpeed's Adam decouples weight decay unless `adam_w_mode` is false."""
    values, prefix = given.values, "optimizer.params."
    kind = values.get("optimizer.type")
    if kind is None:
        return []
    if str(kind).lower() not in ("adam", "adamw"):
        raise ConfigError(f"optimizer.type = {kind!r} is not supported: tk has AdamW (Adam here means the same)")
    decoupled = str(kind).lower() == "adamw" or values.get(prefix + "adam_w_mode", True) is True
    decay = values.get(prefix + "weight_decay")
    if not decoupled and (decay or f"{prefix}weight_decay" in given.left_open):
        raise ConfigError(
            f"{prefix}adam_w_mode = false with {prefix}weight_decay = {decay or 'auto'} adds the decay to the "
            "gradient: tk has AdamW only, whose decay is decoupled; without decay both are the same"
        )
    settings = [Setting("optimizer.name", "adamw", "optimizer.type")]
    if decoupled and values.get(prefix + "torch_adam") is True and given.lacks(prefix + "weight_decay"):
        settings.append(Setting("optimizer.weight_decay", _TORCH_ADAMW_DECAY, prefix + "torch_adam", absent=True))
    return settings


def scheduler(given: Given) -> list[Setting]:
    """The learning rate's course: the schedule, its warmup, its end and its lowest rate."""
    values, prefix = given.values, "scheduler.params."
    kind = values.get("scheduler.type")
    if kind is None:
        return []
    if kind not in _SCHEDULES:
        raise ConfigError(f"scheduler.type = {kind!r} is not supported: tk maps {', '.join(_SCHEDULES)}")
    settings = [Setting("optimizer.schedule", _SCHEDULES[kind], "scheduler.type")]
    key = prefix + "warmup_num_steps"
    steps = convert(key, values.get(key, _WARMUP_STEPS), int)
    if key not in given.left_open:
        settings.append(Setting("optimizer.warmup_steps", steps, key, absent=given.lacks(key)))
    key = prefix + "total_num_steps"
    if key in values:
        settings.append(Setting("train.steps", convert(key, values[key], int), key))
    if kind == "WarmupCosineLR":
        key = prefix + "cos_min_ratio"
        ratio = convert(key, values.get(key, _COS_MIN_RATIO), float)
        return [*settings, Setting("optimizer.min_lr_ratio", ratio, key, absent=given.lacks(key))]
    if kind == "WarmupDecayLR":
        settings.append(Setting("optimizer.min_lr_ratio", 0.0, "scheduler.type"))
    return settings + _peak(given, prefix + "warmup_max_lr")


def _peak(given: Given, key: str) -> list[Setting]:
    """The rate that warmup ends at, which counts in DeepSpeed and not the optimizer's."""
    base = given.values.get("optimizer.params.lr")
    if not given.lacks(key) and key not in given.values:
        return []  # "auto"
    peak = convert(key, given.values.get(key, _WARMUP_MAX_LR), float)
    if base is not None and peak != base:
        origin = ", DeepSpeed's default," if given.lacks(key) else ""
        raise ConfigError(f"{key} = {peak}{origin} and optimizer.params.lr = {base} are one peak rate in tk")
    return [Setting("optimizer.lr", peak, key, absent=given.lacks(key))]


def batch(given: Given, dp: int, micro_batch_size: int) -> list[Setting]:
    """Our two batch sizes from DeepSpeed's three, of which two decide the third."""
    values = given.values
    total, micro, steps = (convert(key, values[key], int) if key in values else None for key in BATCH_KEYS)
    for key, value in zip(BATCH_KEYS, (total, micro, steps), strict=True):
        if value is not None and value < 1:
            raise ConfigError(f"{key} = {value} must be 1 or more")
    origin = BATCH_KEYS[1]
    if micro is None:
        if total is not None and steps is not None and total % (steps * dp) == 0:
            micro = total // (steps * dp)
        else:
            micro, origin = micro_batch_size, "[train] micro_batch_size of the TOML"
    elif total is None and steps is None and given.lacks(BATCH_KEYS[0]) and given.lacks(BATCH_KEYS[2]):
        alone = Setting("train.global_batch_size", micro * dp, BATCH_KEYS[2], absent=True)  # no accumulation
        return [Setting("train.micro_batch_size", micro, origin), alone]
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


def defaults(given: Given, settings: list[Setting]) -> list[Setting]:
    """What DeepSpeed does by itself where a key is absent, and tk would do otherwise."""
    named = {setting.key for setting in settings}
    return [
        Setting(ours, value, source, absent=True)
        for ours, (value, source) in DEFAULTS.items()
        if ours not in named and given.lacks(source)
    ]
