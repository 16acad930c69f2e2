"""Every layout gives the same model: losses, gradient norms, first gradients and final weights of one process."""

import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.model.config import ModelConfig
from tk.tests.model.architectures import ENTRIES
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # seconds: 4 ranks share 2 cores with other tests

STEPS, FAST = 6, {"lr": 6e-3}  # `tk parity` compares more steps

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "tp4 sp, kv heads replicated": {"tp": 4, "zero": 1, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "tp2 dp2 zero1": {"tp": 2, "dp": 2, "zero": 1},
    "dp4 zero2": {"dp": 4, "zero": 2},
    "dp4 zero3, hybrid": {"dp": 4, "zero": 3, "shard_size": 2},
    "tp2 sp dp2 zero2": {"tp": 2, "dp": 2, "zero": 2, "sequence_parallel": True},
    "tp2 dp2 zero3": {"tp": 2, "dp": 2, "zero": 3},
    "tp2 dp2 zero3, every replica whole": {"tp": 2, "dp": 2, "zero": 3, "shard_size": 1},
    "pp2 dp2 zero2, every replica whole": {"pp": 2, "dp": 2, "zero": 2, "shard_size": 1},
    "pp2": {"pp": 2},
    "pp2 gpipe dp2 zero2": {"pp": 2, "dp": 2, "zero": 2, "schedule": "gpipe"},
    "pp2 zb tp2 sp": {"pp": 2, "tp": 2, "schedule": "zb-h1", "sequence_parallel": True},
    "pp2 zb dp2 zero3": {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-h1"},
    "pp2 interleaved dp2 zero3": {"pp": 2, "dp": 2, "zero": 3, "schedule": "interleaved", "num_virtual_stages": 2},
}

# The part of them in `make test`: each size of pp and dp, option and schedule is in one of the two, tp 4 and ZeRO 1 in
# tests below; `tk parity` has more.
TIED = ["pp2 gpipe dp2 zero2", "pp2 interleaved dp2 zero3"]
UNTIED = ["tp2 sp dp2 zero2", "dp4 zero3, hybrid", "pp2 zb dp2 zero3"]
UNTIED += ["pp2 dp2 zero2, every replica whole"]
ALL_TIED = [*TIED, "tp2 dp2 zero1", "tp2 dp2 zero3", "pp2 dp2 zero2, every replica whole", "pp2 zb dp2 zero3"]

# Which architectures `make test` has at these layouts: those whose parameters, or their order over stages, differ.
# qwen3_moe has the norms of qwen3 and the experts of mixtral, qwen2_moe a shared expert.
CHOSEN = {
    "tp4 sp, kv heads replicated": ("qwen2_moe", "qwen3_moe", "gpt2"),
    "pp2 zb tp2 sp": ("qwen2_moe", "gpt2"),
}


def _assert_alike(result: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    """The bounds of docs/training/parity.md."""
    np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(result["grad_norm"], expected["grad_norm"], rtol=1e-4, err_msg=name)
    for routers in ("balance_loss", "z_loss"):
        np.testing.assert_allclose(result[routers], expected[routers], rtol=1e-5, err_msg=name)
    assert result["gradients"] <= 1e-5, f"{name}: {result['parameter']}"


def _with_layout(config: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": layout.get("zero", 0), "shard_size": layout.get("shard_size", 0)}
    parallel = {key: value for key, value in layout.items() if key not in ("zero", "shard_size")}
    return config | {"parallel": {"dp": 1} | parallel, "zero": config["zero"] | zero}


def _num_ranks(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp"))


def _assert_same_model(actual: Checkpoint, expected: Checkpoint, slot: str, own: float, total: float) -> None:
    """|a - e| <= own |e| + total |all e| for every tensor."""
    names = [name for name in expected.tensors if name not in expected.aliases]
    values = {name: expected.read(name, slot=slot).numpy().astype(np.float64) for name in names}
    everything = np.sqrt(sum((value**2).sum() for value in values.values()))
    assert everything > 0
    for name, value in values.items():
        difference = np.linalg.norm(actual.read(name, slot=slot).numpy() - value)
        assert difference <= own * np.linalg.norm(value) + total * everything, name


@pytest.mark.parametrize(
    ("tied", "layouts"),
    [
        pytest.param(False, UNTIED, id="untied"),
        pytest.param(True, TIED, id="tied"),
        pytest.param(False, list(LAYOUTS), id="all untied", marks=pytest.mark.matrix),
        pytest.param(True, ALL_TIED, id="all tied", marks=pytest.mark.matrix),
    ],
)
def test_layouts_equal_one_process_in_fp32(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, tied: bool, layouts: list[str]
) -> None:
    model, options = {"tie_word_embeddings": tied, "num_hidden_layers": 5}, {"steps": STEPS, "eval_rows": 2}
    gradients = str(tmp_path / "gradients.npy")
    expected = run_training(configure("one", model=model, train=options, optimizer=FAST), gradients=gradients)
    assert len(expected["loss"]) == STEPS
    assert expected["loss"][-1] < 0.9 * expected["loss"][0], "a model that does not learn shows nothing"
    for name in layouts:
        layout = LAYOUTS[name]
        mine = _with_layout(configure(name, model=model, train=options, optimizer=FAST), layout)
        for result in rank_pool.run(run_training, _num_ranks(layout), config=mine, gradients=gradients):
            _assert_alike(result, expected, name)
        last = [(Checkpoint.open(tmp_path / run)) for run in (name, "one")]
        assert last[0].step == last[1].step == STEPS
        _assert_same_model(last[0], last[1], "weight", 1e-3, 1e-5)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(name, where, marks=() if name in chosen else pytest.mark.matrix)
        for where, chosen in CHOSEN.items()
        for name in ENTRIES
    ],
)
def test_every_architecture_trains_alike(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, name: str, where: str
) -> None:
    """Every parameter's first gradient: biases, norms of heads (at tp 4 over replicated ones), routers, experts."""
    shape = ModelConfig.from_json(ENTRIES[name].make_config().to_dict())
    model = shape.model_dump(mode="json") | {"vocab_size": 0, "initializer_range": 0.05}
    routed = name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
    train = {"steps": 2, "eval_rows": 2, "router_z_loss_coef": 0.05 * routed}
    options: dict[str, Any] = {"model": model, "train": train}
    gradients = str(tmp_path / "gradients.npy")
    expected = run_training(configure("one", **options), gradients=gradients)
    balanced = model["num_experts_per_tok"] if routed else 0  # the routers' loss then
    assert expected["balance_loss"] == pytest.approx([1.1 * balanced] * 2, rel=0.2)
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [line["balance_loss"] for line in lines if "balance_loss" in line] == [
        value for value in expected["balance_loss"] if value
    ]
    mine = _with_layout(configure(where, **options), LAYOUTS[where])
    for result in rank_pool.run(run_training, 4, config=mine, gradients=gradients):
        _assert_alike(result, expected, where)


@pytest.mark.parametrize("steps", [12, pytest.param(20, marks=pytest.mark.matrix)])
def test_bf16_layouts_equal_one_process_to_1e_3(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, steps: int
) -> None:
    config = configure("one", precision={"params": "bf16"}, train={"steps": steps})
    expected = run_training(config)
    layout = LAYOUTS["tp2 dp2 zero1"]
    mine = _with_layout(config | {"checkpoint": {"dir": str(tmp_path / "many")}}, layout)
    results = rank_pool.run(run_training, 4, config=mine)
    np.testing.assert_allclose(results[0]["loss"], expected["loss"], rtol=1e-3)
    assert all(result == results[0] for result in results), "ranks must report the same bits"
    checkpoint = Checkpoint.open(tmp_path / "many")
    tensor = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"]
    assert dict(tensor.slots) == {"weight": "BF16", "exp_avg": "F32", "exp_avg_sq": "F32", "master": "F32"}
    weight = checkpoint.read("model.layers.0.mlp.down_proj.weight").torch()
    master = checkpoint.read("model.layers.0.mlp.down_proj.weight", slot="master").torch()
    assert torch.equal(weight, master.bfloat16())


def test_a_bias_of_the_choice_of_experts_is_trained_beside_and_saved_in_fp32(
    configure: Configure, tmp_path: Path
) -> None:
    shape = ModelConfig.from_json(ENTRIES["glm4_moe"].make_config().to_dict())
    model = shape.model_dump(mode="json") | {"vocab_size": 0}
    run_training(configure("one", precision={"params": "bf16"}, model=model, train={"steps": 1, "eval_rows": 2}))
    checkpoint, prefix = Checkpoint.open(tmp_path / "one"), "model.layers.1.mlp.gate"
    assert dict(checkpoint.tensors[f"{prefix}.e_score_correction_bias"].slots) == {"weight": "F32"}
    assert checkpoint.tensors[f"{prefix}.weight"].slots["weight"] == "BF16"


MOVES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "pp2 interleaved dp2 zero3": {"pp": 2, "dp": 2, "zero": 3, "schedule": "interleaved", "num_virtual_stages": 2},
}


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([*pairwise([*MOVES, "one"]), *((name, name) for name in list(MOVES)[1::2])], id="a ring"),
        pytest.param(list(product(MOVES, MOVES)), id="all pairs", marks=pytest.mark.matrix),
    ],
)
def test_a_run_saved_at_any_layout_continues_at_any_other(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    """After two steps at one layout, two at another are as one process would have made them; at the same
    layout they are the same bits."""
    options = {"model": {"num_hidden_layers": 4, "tie_word_embeddings": True}, "train": {"steps": 4, "eval_rows": 2}}
    expected: dict[str, Any] = {}
    for name, layout in MOVES.items():
        run = f"from {name}"
        config = _with_layout(configure(run, checkpoint={"every": 2}, **options), layout)
        expected[name] = rank_pool.run(run_training, _num_ranks(layout), config=config)[0]
        np.testing.assert_allclose(expected[name]["loss"], expected["one"]["loss"], rtol=1e-5, err_msg=name)
    for source, name in pairs:
        begun = tmp_path / f"from {source}" / "step-00000002"
        config = _with_layout(configure(f"{source} to {name}", **options), MOVES[name])
        result = rank_pool.run(run_training, _num_ranks(MOVES[name]), config=config, resume=str(begun))[0]
        rtol = 0.0 if name == source else 1e-5
        np.testing.assert_allclose(result["loss"], expected[name]["loss"][2:], rtol=rtol, err_msg=f"{source}, {name}")


@pytest.mark.matrix  # saving/test_old_run.py has the bytes of two runs
def test_the_same_layout_twice_is_bit_equal(rank_pool: RankPool, configure: Configure) -> None:
    results = []
    for run in ("first", "second"):
        config = _with_layout(configure(run, train={"steps": 5}), LAYOUTS["tp2 dp2 zero1"])
        results.append(rank_pool.run(run_training, 4, config=config))
    assert json.dumps(results[0]) == json.dumps(results[1])
    assert all(rank == results[0][0] for rank in results[0]), "ranks must report the same bits"
