"""The sections of the configuration: values that are refused, and the shape of a model with and without `init`."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.model.config import ModelConfig
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


def test_a_model_with_init_takes_its_shape_from_the_checkpoint_and_travels_as_it_was_read() -> None:
    section = ModelSection(init="runs/a")
    assert not section.is_known
    shaped = section.with_shape(ModelConfig(vocab_size=99, hidden_size=128))
    assert shaped.is_known
    assert (shaped.vocab_size, shaped.hidden_size) == (99, 128)
    assert shaped.model_dump() == {"init": "runs/a"}
    assert ModelSection(hidden_size=128).model_dump()["hidden_size"] == 128


def test_a_complete_shape_has_what_the_section_leaves_open() -> None:
    found = ModelSection(hidden_size=128).complete(301, {7, 2}, "bf16")
    assert type(found) is ModelConfig
    assert (found.hidden_size, found.vocab_size, found.eos_token_id, found.dtype) == (128, 301, (2, 7), "bfloat16")
    given = ModelSection(vocab_size=512, eos_token_id=(5,)).complete(301, {7}, "fp32")
    assert (given.vocab_size, given.eos_token_id, given.dtype) == (512, (5,), "float32")
