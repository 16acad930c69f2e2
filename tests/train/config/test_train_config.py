"""The training configuration: checks across sections, the layout for a number of ranks, and parameter groups."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError, ParallelError
from tk.core.layout import Layout
from tk.core.tensors import TensorSpec
from tk.train.config.sections import OptimizerSection
from tk.train.config.train_config import TrainConfig, param_groups


def config(**sections: dict[str, Any]) -> TrainConfig:
    return parse({"checkpoint": {"dir": "runs/test"}, **sections}, TrainConfig, "test")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"train": {"seq_len": 64}, "model": {"max_position_embeddings": 32}},
            "train.seq_len = 64 exceeds model.max_position_embeddings = 32",
        ),
        (
            {"train": {"seq_len": 65}, "model": {"max_position_embeddings": 32, "rope_scaling": YARN}},
            "train.seq_len = 65 exceeds model.max_position_embeddings = 32, which YaRN extends to 64",
        ),
        ({"train": {"steps": 3}, "optimizer": {"warmup_steps": 4}}, "warmup_steps = 4 exceeds train.steps = 3"),
        ({"parallel": {"schedule": "interleaved"}}, '"interleaved" needs 2 or more'),
        ({"parallel": {"schedule": "zb-h1", "num_virtual_stages": 2}}, '"1f1b" and "zb-h1" take 1'),
        (
            {"train": {"seq_len": 9}, "parallel": {"sequence_parallel": True, "tp": 2}},
            "9 % 2 = 0, not 1; use a multiple of 2",
        ),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sections: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**sections)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("dp", "num_ranks", "expected"), [("auto", 12, 3), ("auto", None, 1), (3, 12, 3), (3, None, 3)]
)
def test_data_parallel_ranks_are_those_that_are_left(dp: Any, num_ranks: int | None, expected: int) -> None:
    found = config(parallel={"tp": 2, "pp": 2, "dp": dp}, zero={"stage": 2, "bucket_size": 99}).layout(num_ranks)
    assert found == Layout(tp=2, pp=2, dp=expected, zero=2, bucket_size=99)


@pytest.mark.parametrize(
    ("dp", "num_ranks", "said"),
    [
        ("auto", 6, "6 % (2 x 2) = 2 must be 0. Start a multiple of 4 ranks"),
        (3, 8, "tp x pp x dp = 2 x 2 x 3 = 12 ranks, but the job has 8"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(dp: Any, num_ranks: int, said: str) -> None:
    with pytest.raises(ParallelError) as error:
        config(parallel={"tp": 2, "pp": 2, "dp": dp}).layout(num_ranks)
    assert said in str(error.value)


def test_matrices_decay_and_frozen_tensors_and_aliases_are_in_no_group() -> None:
    table = (
        TensorSpec("embed", (5, 4)),
        TensorSpec("norm", (4,)),
        TensorSpec("frozen", (4, 4), trainable=False),
        TensorSpec("experts", (2, 4, 4)),
        TensorSpec("head", (5, 4), alias="embed"),
    )
    decaying, others = param_groups(OptimizerSection(weight_decay=0.3, lr=0.1), table)
    assert (decaying["params"], decaying["weight_decay"]) == (["embed", "experts"], 0.3)
    assert (others["params"], others["weight_decay"]) == (["norm"], 0.0)
    assert decaying["lr"] == others["lr"] == 0.1
