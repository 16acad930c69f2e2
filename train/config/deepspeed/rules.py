"""Rules that turn the values of a DeepSpeed JSON into settings of tk: one pure function per subject."""

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
    """A value for a key of tk.

    Attributes:
        key: the key of tk, such as "zero.stage".
        value: the value in tk's unit and type.
        source: the key of the JSON file that the value comes from.
        absent: whether the JSON file lacks that key. The value then is DeepSpeed's default, and the TOML file's counts
            if it has one.
    """

    key: str
    value: Any
    source: str
    absent: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """The keys of a DeepSpeed JSON file.

    Attributes:
        values: the values by dotted key, without those that are "auto".
        left_open: the dotted keys that are "auto".
    """

    values: Mapping[str, Any]
    left_open: frozenset[str] = frozenset()

    def lacks(self, key: str) -> bool:
        """Whether a key is absent: it has no value, and neither the key nor its section is "auto"."""
        parts = key.split(".")
        names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return key not in self.values and not names & self.left_open


def direct(given: Given) -> list[Setting]:
    """Maps keys that both configurations have."""
    values = given.values
    settings = [
        Setting(ours, convert(source, values[source], kind), source)
        for source, (ours, kind) in DIRECT.items()
        if source in values
    ]
    key = "zero_optimization.mics_shard_size"
    if key in values:
        settings.append(Setting("zero.shard_size", max(0, convert(key, values[key], int)), key))  # -1 is off
    return settings


def convert(source: str, value: Any, kind: type) -> Any:
    """Returns a JSON value as `kind`; 5e8 counts as a whole number.

    Raises:
        ConfigError: the value is of another kind.
    """
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
    """Maps the dtype of parameters and the initial loss scale."""
    values = given.values
    enabled = {key: values[key] for key in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled") if key in values}
    chosen = [key for key, value in enabled.items() if convert(key, value, bool)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are both true; choose one")
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
    """Maps AdamW, and Adam, which in DeepSpeed is AdamW unless `adam_w_mode` is false."""
    values, prefix = given.values, "optimizer.params."
    kind = values.get("optimizer.type")
    if kind is None:
        return []
    if str(kind).lower() not in ("adam", "adamw"):
        raise ConfigError(f"optimizer.type = {kind!r} is not supported: tk has AdamW (and Adam, as its other name)")
    decoupled = str(kind).lower() == "adamw" or values.get(prefix + "adam_w_mode", True) is True
    decay = values.get(prefix + "weight_decay")
    if not decoupled and (decay or f"{prefix}weight_decay" in given.left_open):
        raise ConfigError(
            f"{prefix}adam_w_mode = false with {prefix}weight_decay = {decay or 'auto'} adds the decay to the "
            "gradient; tk has only AdamW, whose decay is decoupled. Use AdamW, or weight_decay = 0, for which both are "
            "the same"
        )
    settings = [Setting("optimizer.name", "adamw", "optimizer.type")]
    if decoupled and values.get(prefix + "torch_adam") is True and given.lacks(prefix + "weight_decay"):
        settings.append(Setting("optimizer.weight_decay", _TORCH_ADAMW_DECAY, prefix + "torch_adam", absent=True))
    return settings


def scheduler(given: Given) -> list[Setting]:
    """Maps the learning-rate schedule with its warmup, its length and its lowest rate."""
    values, prefix = given.values, "scheduler.params."
    kind = values.get("scheduler.type")
    if kind is None:
        return []
    if kind not in _SCHEDULES:
        raise ConfigError(f"scheduler.type = {kind!r} is not supported; supported are {', '.join(_SCHEDULES)}")
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
    """Maps the rate at which warmup ends: with a scheduler DeepSpeed uses it in place of the optimizer's rate."""
    base = given.values.get("optimizer.params.lr")
    if not given.lacks(key) and key not in given.values:
        return []  # "auto"
    peak = convert(key, given.values.get(key, _WARMUP_MAX_LR), float)
    if base is not None and peak != base:
        origin = ", DeepSpeed's default," if given.lacks(key) else ""
        raise ConfigError(
            f"{key} = {peak}{origin} and optimizer.params.lr = {base} differ; tk has one peak rate, so make them equal"
        )
    return [Setting("optimizer.lr", peak, key, absent=given.lacks(key))]


def batch(given: Given, dp: int, micro_batch_size: int) -> list[Setting]:
    """Maps DeepSpeed's three batch sizes, of which two determine the third, to the two of tk."""
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
    """Returns the message for batch sizes that contradict each other, with every change of one value that fits."""
    fixes = [f"train_batch_size = {micro * steps * dp}"]
    if total % (micro * dp) == 0:
        fixes.append(f"gradient_accumulation_steps = {total // (micro * dp)}")
    if total % (steps * dp) == 0:
        fixes.append(f"a micro-batch of {total // (steps * dp)}")
    if total % (micro * steps) == 0:
        fixes.append(f"dp = {total // (micro * steps)}")
    return (
        f"train_batch_size = {total} must be micro-batch x gradient_accumulation_steps x dp = {micro} x {steps} x {dp} "
        f"= {micro * steps * dp}. The micro-batch is {origin}; dp is the number of ranks / (tp x pp), from --nproc, "
        f"torchrun or [parallel] dp. Any of these changes is enough: {', '.join(fixes)}. Or remove one of the three "
        "keys: it is computed from the others"
    )


def defaults(given: Given, settings: list[Setting]) -> list[Setting]:
    """Returns DeepSpeed's defaults for absent keys, if they differ from those of tk."""
    named = {setting.key for setting in settings}
    return [
        Setting(ours, value, source, absent=True)
        for ours, (value, source) in DEFAULTS.items()
        if ours not in named and given.lacks(source)
    ]
