"""The rules for a DeepSpeed JSON, one by one: each maps given keys to settings, and names the key that it refuses."""

from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.train.config.deepspeed.rules import (
    Given,
    Setting,
    batch,
    convert,
    defaults,
    direct,
    optimizer,
    precision,
    scheduler,
)


def settings(found: list[Setting]) -> dict[str, Any]:
    return {setting.key: setting.value for setting in found}


def test_a_key_is_absent_unless_it_or_its_section_is_given_or_auto() -> None:
    given = Given({"gradient_clipping": 1.0}, frozenset({"optimizer", "fp16.loss_scale_window"}))
    keys = ("gradient_clipping", "optimizer.params.lr", "fp16.loss_scale_window", "fp16.min_loss_scale", "seed")
    assert [given.lacks(key) for key in keys] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("value", "kind", "expected"), [(5e8, int, 500_000_000), (3, float, 3.0), (False, bool, False), ([1], list, [1])]
)
def test_json_values_are_converted(value: Any, kind: type, expected: Any) -> None:
    found = convert("key", value, kind)
    assert (found, type(found)) == (expected, kind)


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (1.5, int, "key = 1.5 must be a whole number"),
        (True, int, "key = True must be a whole number"),
        ("1e-3", float, "key = '1e-3' must be a number"),
        (1, bool, "key = 1 must be true or false"),
        (0.9, list, "key = 0.9 must be an array"),
    ],
)
def test_values_of_another_kind_are_refused(value: Any, kind: type, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        convert("key", value, kind)


@pytest.mark.parametrize(("size", "expected"), [(4, 4), (-1, 0)])
def test_a_negative_size_of_mics_turns_it_off(size: int, expected: int) -> None:
    given = Given({"zero_optimization.mics_shard_size": size, "seed": 7})
    assert settings(direct(given)) == {"zero.shard_size": expected, "train.seed": 7}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"fp16.enabled": True}, {"precision.params": "fp16"}),
        ({"bfloat16.enabled": True, "fp16.enabled": False}, {"precision.params": "bf16"}),
        ({"bf16.enabled": False}, {"precision.params": "fp32"}),
        ({"fp16.initial_scale_power": 16}, {"precision.initial_loss_scale": 65536.0}),
    ],
)
def test_the_precision_is_the_one_that_is_enabled(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings(precision(Given(values))) == expected


def test_two_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bf16\.enabled and fp16\.enabled are both true"):
        precision(Given({"bf16.enabled": True, "fp16.enabled": True}))


def test_the_adamw_of_torch_decays_by_default() -> None:
    values = {"optimizer.type": "AdamW", "optimizer.params.torch_adam": True}
    assert settings(optimizer(Given(values))) == {"optimizer.name": "adamw", "optimizer.weight_decay": 0.01}
    values["optimizer.params.weight_decay"] = 0.3
    assert settings(optimizer(Given(values))) == {"optimizer.name": "adamw"}, "the decay is mapped directly"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"type": "Lamb"}, "optimizer.type = 'Lamb' is not supported"),
        ({"type": "Adam", "params.adam_w_mode": False, "params.weight_decay": 0.1}, "decay is decoupled"),
    ],
)
def test_other_optimizers_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        optimizer(Given({f"optimizer.{key}": value for key, value in values.items()}))


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": 0.1}, {"schedule": "constant", "lr": 0.1}),
        ("WarmupDecayLR", {"warmup_num_steps": 5}, {"schedule": "linear", "min_lr_ratio": 0.0, "lr": 1e-3}),
        ("WarmupCosineLR", {"warmup_num_steps": 5}, {"schedule": "cosine", "min_lr_ratio": 1e-4}),
    ],
)
def test_schedules_have_their_shape_and_lowest_rate(
    kind: str, params: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = Given({"scheduler.type": kind, **{f"scheduler.params.{key}": value for key, value in params.items()}})
    found = {key.removeprefix("optimizer."): value for key, value in settings(scheduler(given)).items()}
    assert found == expected | {"warmup_steps": 5}


def test_a_warmup_that_ends_at_another_rate_than_the_optimizers_is_refused() -> None:
    values = {"scheduler.type": "WarmupLR", "optimizer.params.lr": 0.1}
    with pytest.raises(
        ConfigError, match=r"warmup_max_lr = 0\.001, DeepSpeed's default, and optimizer.params.lr = 0\.1"
    ):
        scheduler(Given(values))
    assert "optimizer.lr" not in settings(scheduler(Given(values, frozenset({"scheduler.params.warmup_max_lr"}))))


@pytest.mark.parametrize(
    ("total", "micro", "steps", "expected"),
    [
        (24, 3, 4, (3, 24)),
        (24, 3, None, (3, 24)),
        (24, None, 4, (3, 24)),
        (None, 3, 4, (3, 24)),
        (None, 3, None, (3, 6)),
        (24, None, None, (None, 24)),
        (None, None, 4, (None, 40)),  # with the micro-batch of the TOML
    ],
)
def test_two_batch_sizes_determine_the_third(
    total: int | None, micro: int | None, steps: int | None, expected: tuple[int | None, int]
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = {key: value for key, value in zip(keys, (total, micro, steps), strict=True) if value is not None}
    found = settings(batch(Given(values), dp=2, micro_batch_size=5))
    assert (found.get("train.micro_batch_size"), found["train.global_batch_size"]) == expected


def test_batch_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="train_batch_size = 0 must be 1 or more"):
        batch(Given({"train_batch_size": 0}), 2, 5)


def test_defaults_fill_in_keys_that_neither_a_rule_nor_the_file_sets() -> None:
    given = Given({"gradient_clipping": 1.0}, frozenset({"optimizer.params.lr"}))
    found = defaults(given, [Setting("optimizer.schedule", "linear", "scheduler.type")])
    assert settings(found) == {"optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0}
    assert all(setting.absent for setting in found)
