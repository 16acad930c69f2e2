"""The learning rate, step by step."""

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.train.config.sections import OptimizerSection
from tk.train.config.train_config import TrainConfig
from tk.train.engine.lr_schedule import learning_rate
from tk.train.foreign.options import optimizer_section


def rates(num_steps: int, **options: object) -> list[float]:
    section = OptimizerSection.model_validate({"lr": 1.0, "min_lr_ratio": 0.1, **options})
    return [learning_rate(step, num_steps, section) for step in range(num_steps)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_every_schedule_warms_up_and_ends_where_it_should(schedule: str) -> None:
    found = rates(20, schedule=schedule, warmup_steps=4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert found[3:] == sorted(found[3:], reverse=True)


def test_wsd_is_stable_then_falls_in_a_line() -> None:
    found = rates(20, schedule="wsd", warmup_steps=4, decay_share=0.25)
    assert found[4:15] == [1.0] * 11
    assert found[15:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    longer = rates(40, schedule="wsd", warmup_steps=4, decay_share=0.25)
    assert longer[:15] == found[:15], "a run can be prolonged from before its decay"


@pytest.mark.parametrize(
    ("num_steps", "warmup", "share"), [(1, 0, 0.2), (3, 5, 0.5), (10, 9, 1.0), (10, 0, 1.0), (4, 0, 0.01)]
)
def test_wsd_of_few_steps_stays_between_its_bounds(num_steps: int, warmup: int, share: float) -> None:
    found = rates(num_steps, schedule="wsd", warmup_steps=warmup, decay_share=share)
    assert all(0.1 <= rate <= 1.0 for rate in found)


def test_a_warmup_that_never_ends_is_refused() -> None:
    data = {"checkpoint": {"dir": "run"}, "train": {"steps": 20}}
    assert parse(data | {"optimizer": {"warmup_steps": 20}}, TrainConfig, "test").optimizer.warmup_steps == 20
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps = 21 exceeds train.steps = 20"):
        parse(data | {"optimizer": {"warmup_steps": 21}}, TrainConfig, "test")
    with pytest.raises(ConfigError, match=r"warmup_steps = 21 exceeds steps = 20"):
        optimizer_section({"warmup_steps": 21}, 20)
    assert optimizer_section({"warmup_steps": 21}, 0).warmup_steps == 21, "a constant rate has no end"
