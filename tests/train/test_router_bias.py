"""The biases that balance experts: first forward passes count, every layout makes the same bits, runs resume them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.core.config import parse
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table
from tk.tests.model.architectures import ENTRIES
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.train.config.train_config import TrainConfig
from tk.train.planning.problems import problems

RATE = 0.01
STILL = {"optimizer": {"lr": 1e-12, "min_lr_ratio": 1.0}}  # rounding and schedule do not change the routing
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero3": {"parallel": {"dp": 2}, "zero": {"stage": 3}},
    "tp2 sp": {"parallel": {"dp": 1, "tp": 2, "sequence_parallel": True}},
    "pp2": {"parallel": {"dp": 1, "pp": 2}},
    "cp2": {"parallel": {"dp": 1, "cp": 2}},
    "ep2": {"parallel": {"dp": 2, "ep": 2}},
}


def options(steps: int, **more: Any) -> dict[str, Any]:
    """Returns the options of a run of GLM-4.5's kind."""
    shape = ModelConfig.from_json(ENTRIES["glm4_moe"].make_config().to_dict())
    train = {"steps": steps, "eval_rows": 2, "router_bias_update_rate": RATE}
    return {"model": shape.model_dump(mode="json") | {"vocab_size": 0}, "train": train, **more}


def biases(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(run)
    names = [name for name in checkpoint.tensors if name.endswith("e_score_correction_bias")]
    return {name: checkpoint.read(name).torch() for name in names}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_recomputation_counts_no_token_twice(configure: Configure, tmp_path: Path) -> None:
    for mode in ("none", "full"):
        run_training(configure(mode, **options(4, recompute={"mode": mode})))
    found = biases(tmp_path / "none")
    assert len(found) == 2
    assert all(RATE / 2 < bias.abs().max() <= 4.01 * RATE for bias in found.values())
    assert same(found, biases(tmp_path / "full"))


@pytest.mark.parametrize(
    ("steps", "names"),
    [(3, ["tp2 sp", "cp2", "ep2"]), pytest.param(50, list(LAYOUTS), marks=pytest.mark.matrix)],
)
def test_every_layout_makes_the_same_bits(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, steps: int, names: list[str]
) -> None:
    run_training(configure("one", **options(steps, **STILL)))
    for name in names:
        rank_pool.run(run_training, 2, config=configure(name, **options(steps, **STILL, **LAYOUTS[name])))
        assert same(biases(tmp_path / name), biases(tmp_path / "one")), name


def test_a_run_that_is_resumed_goes_on_with_the_same_bits(configure: Configure, tmp_path: Path) -> None:
    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
        for steps in parts:
            run_training(configure(name, **options(steps, **STILL)))
    assert same(biases(tmp_path / "parts"), biases(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("key", "complaint", "architecture", "wanted"),
    [
        ("router_bias_update_rate", "updates", "llama", 1),
        ("router_bias_update_rate", "updates", "mixtral", 1),
        ("router_bias_update_rate", "updates", "glm4_moe", 0),
        ("router_z_loss_coef", "weighs", "llama", 1),
        ("router_z_loss_coef", "weighs", "mixtral", 0),
    ],
)
def test_a_model_without_routers_or_their_biases_is_refused(
    configure: Configure, key: str, complaint: str, architecture: str, wanted: int
) -> None:
    text = configure(model={"architecture": architecture}, train={key: RATE})
    config = parse(text, TrainConfig, "test")
    table = tensor_table(ModelConfig.model_validate(config.model.model_dump(exclude={"init"}) | {"vocab_size": 64}))
    assert len([each for each in problems(config, table, 1) if f"{key} = 0.01 {complaint}" in each]) == wanted


def test_biases_of_a_base_stay_as_they_are_under_an_adapter(configure: Configure) -> None:
    config = parse(configure(**options(1), lora={}), TrainConfig, "test")
    table = tensor_table(ModelConfig.model_validate(config.model.model_dump(exclude={"init"}) | {"vocab_size": 64}))
    assert [each for each in problems(config, table, 1) if "biases of the base, which an adapter does not hold" in each]
