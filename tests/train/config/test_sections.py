"""The sections of the configuration: values that are refused, and the shape of a model with and without `init`."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.model.shape import ModelShape
from tk.train.config.sections import ModelSection, TrainSection
from tk.train.config.train_config import TrainConfig


def config(**sections: dict[str, Any]) -> TrainConfig:
    return parse({"checkpoint": {"dir": "runs/test"}, **sections}, TrainConfig, "test")


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("train", {"profile": "4"}, 'it must be "A:B"'),
        ("train", {"profile": "5:4"}, 'it must be "A:B"'),
        ("train", {"profile": "0:4"}, 'it must be "A:B"'),
        ("optimizer", {"betas": [0.9, 1.0]}, "both betas must be in [0, 1)"),
        ("zero", {"stage": 4}, "stage"),
        ("data", {"sources": []}, "sources"),
        ("checkpoint", {"dir": ""}, "dir"),
    ],
)
def test_values_out_of_bounds_are_refused_by_key(section: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**{section: values})
    assert said in str(error.value)
    assert f"{section}.{next(iter(values))}" in str(error.value)


def test_arrays_become_tuples() -> None:
    found = config(
        train={"freeze": ["*norm*"]}, optimizer={"betas": [0.8, 0.9]}, data={"sources": [{"path": "a", "weight": 2}]}
    )
    assert found.train.freeze == ("*norm*",)
    assert found.optimizer.betas == (0.8, 0.9)
    assert [(source.path, source.weight) for source in found.data.sources if not isinstance(source, str)] == [("a", 2)]


@pytest.mark.parametrize(("text", "steps"), [("", []), ("3:5", [3, 4, 5]), ("7:7", [7])])
def test_profiled_steps_include_both_ends(text: str, steps: list[int]) -> None:
    assert list(TrainSection(profile=text).profiled_steps) == steps


def test_a_section_is_written_as_it_was_read() -> None:
    assert ModelSection(init="runs/a").model_dump() == {"init": "runs/a"}
    written = ModelSection(hidden_size=128).model_dump()
    assert (written["hidden_size"], written["vocab_size"]) == (128, 0)
    assert config(model=written).model == ModelSection(hidden_size=128)


def test_a_section_is_no_shape() -> None:
    assert not issubclass(ModelSection, ModelShape)


def test_an_option_that_the_architecture_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window = 8 is not an option of llama"):
        config(model={"sliding_window": 8})
