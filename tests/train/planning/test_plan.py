"""`tk plan`: ZeRO's formulas, the memory of each rank, and a list of all problems at once."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ParallelError
from tk.core.local_params import local_params
from tk.model.registry import count_parameters, decoder_spec
from tk.tests.train.conftest import Configure
from tk.train.config.run_inputs import stdlib_of
from tk.train.config.train_config import TrainConfig
from tk.train.planning.model_states import model_state_bytes
from tk.train.planning.plan import make_plan


def _config(configure: Configure, **sections: dict[str, Any]) -> TrainConfig:
    model = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 2048}
    sections["model"] = model | sections.get("model", {})
    sections["zero"] = {"bucket_size": 2**20} | sections.get("zero", {})
    return parse(configure(**sections), TrainConfig, "test")


@pytest.mark.parametrize(
    ("params", "stage", "per_param"),
    [
        ("bf16", 0, 2 + 4 + 12),
        ("bf16", 1, 2 + 4 + 12 / 4),
        ("bf16", 2, 2 + (4 + 12) / 4),
        ("bf16", 3, (4 + 12) / 4),
        ("fp32", 0, 4 + 4 + 8),
        ("fp32", 1, 4 + 4 + 8 / 4),
        ("fp32", 2, 4 + (4 + 8) / 4),
        ("fp32", 3, (4 + 4 + 8) / 4),
    ],
)
def test_model_states_follow_the_formulas_of_zero(
    configure: Configure, params: str, stage: int, per_param: float
) -> None:
    config = _config(configure, precision={"params": params}, zero={"stage": stage})
    plan = make_plan(config, 4)
    states = sum(plan.memory[0].device[part] for part in ("parameters", "gradients", "optimizer"))
    assert states == pytest.approx(per_param * count_parameters(decoder_spec(plan.model)), rel=0.05)


@pytest.mark.parametrize(
    ("params", "stage", "per_param", "saved"),
    [("bf16", 0, 4 + 4, 2 + 4 + 4), ("bf16", 3, 4 / 4, 2 + 4 + 4), ("fp32", 1, 4 / 4, 4 + 4)],
)
def test_bf16_moments_take_half(configure: Configure, params: str, stage: int, per_param: float, saved: float) -> None:
    """At stage 3 masters are counted as parameters."""
    options: dict[str, Any] = {"precision": {"params": params}, "zero": {"stage": stage}}
    config = _config(configure, optimizer={"states": "bf16"}, checkpoint={"every": 5}, **options)
    plan = make_plan(config, 4)
    parameters = count_parameters(decoder_spec(plan.model))
    assert plan.memory[0].device["optimizer"] == pytest.approx(per_param * parameters, rel=0.05)
    assert plan.memory[0].host["copy for saves"] == pytest.approx(saved * parameters / 4, rel=0.2)


def test_the_copy_for_saves_is_counted_if_a_save_is_in_the_background(configure: Configure) -> None:
    def copies(every: int, background: bool, steps: int = 10) -> list[int | None]:
        saving = {"every": every, "async_save": background}
        config = configure(train={"steps": steps}, checkpoint=saving, parallel={"dp": 2}, zero={"stage": 1})
        return [
            placed.host.get("copy for saves") for placed in make_plan(parse(config, TrainConfig, "test"), None).memory
        ]

    assert copies(0, True) == copies(5, False) == copies(10, True) == [None], "the last save is waited for"
    (size,) = copies(5, True)
    assert size
    parameters = make_plan(parse(configure(), TrainConfig, "test"), None).num_parameters
    assert size == pytest.approx(12 * parameters / 2, rel=0.1), "fp32: weights and two states, divided over dp"


def test_whole_buckets_are_counted_only_while_they_are_exchanged(configure: Configure) -> None:
    configs = {overlap: _config(configure, zero={"stage": 3, "overlap": overlap}) for overlap in (True, False)}
    layout = configs[True].layout(4)
    params = local_params(decoder_spec(make_plan(configs[True], 4).model).table, layout, 0)
    held = {overlap: model_state_bytes(config, layout, params, 1).device for overlap, config in configs.items()}
    assert held[True]["buckets"] < held[False]["buckets"]
    assert held[True]["gathered parameters"] > held[False]["gathered parameters"] > 0
    total = sum(param.size for param in params)
    assert held[False]["buckets"] == pytest.approx(4 * total, rel=0.01)


def test_recomputing_keeps_less_and_the_first_pipeline_rank_most(configure: Configure) -> None:
    activations = {}
    for mode in ("none", "selective", "full"):
        config = _config(configure, recompute={"mode": mode}, parallel={"pp": 2}, train={"global_batch_size": 24})
        plan = make_plan(config, 2)
        activations[mode] = [placed.device["activations"] for placed in plan.memory]
        assert plan.in_flight == (2, 1)
        assert plan.memory[0].device["head and loss"] == 0 < plan.memory[1].device["head and loss"]
    assert activations["none"][0] > activations["selective"][0] > activations["full"][0]
    assert all(first > last for first, last in activations.values())


def test_every_problem_is_listed_at_once(configure: Configure) -> None:
    config = _config(configure, parallel={"tp": 3, "pp": 5}, model={"num_key_value_heads": 2})
    with pytest.raises(ParallelError) as error:
        make_plan(config, 7)
    text = str(error.value)
    for part in (
        "(1) [parallel]: the number of ranks % (tp x pp) = 7 % (3 x 5) = 7 must be 0",
        "num_attention_heads % tp = 4 % 3 = 1",
        "num_key_value_heads % tp = 2 % 3 = 2",
        "pp x num_virtual_stages = 5 x 1 = 5 stages",
    ):
        assert part in text
    assert "intermediate_size" not in text, "768 is divisible"


def test_a_batch_that_leaves_rows_empty_is_noted(configure: Configure) -> None:
    plan = make_plan(_config(configure, train={"global_batch_size": 6, "micro_batch_size": 4}), 1)
    assert "6 % (1 x 4) = 2: 2 of 8 rows are empty" in plan.notes[0]


def test_the_tokenizer_of_pythons_library_says_nothing_about_other_sources(
    configure: Configure, corpus: Path, tmp_path: Path
) -> None:
    data = {"sources": [{"path": str(tmp_path / "elsewhere")}], "tokenizer": None, "cache": str(tmp_path / "cache")}
    config = _config(configure, data=data, model={"vocab_size": 256})
    shutil.copytree(corpus / "tokenizer", stdlib_of(config).tokenizer)
    plan = make_plan(config, 1)
    assert plan.model.vocab_size == 256
    assert "elsewhere does not exist" in "".join(plan.notes)
