"""Runs with context parallelism give the model of one process: losses, gradient norms, first gradients, evaluation."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.core.config import parse
from tk.core.errors import ParallelError
from tk.core.layout import Stage
from tk.model.config import ModelConfig
from tk.parallel.collectives import PendingResult, start_all_to_all
from tk.tests.model.architectures import ENTRIES
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer, run_training
from tk.train.config.train_config import TrainConfig
from tk.train.context.kernels import Tensors
from tk.train.context.modes import Mode
from tk.train.context.tiled import attend_tiles
from tk.train.context.tiles import AttentionTile
from tk.train.planning.activation_memory import stage_bytes
from tk.train.planning.plan import make_plan
from tk.train.planning.planned_run import prepare_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # seconds: 4 ranks share 2 cores with other tests

STEPS = 3
GATHER, ULYSSES = {"cp": 2, "cp_mode": "gather"}, {"cp": 2, "cp_mode": "ulysses"}
PACKED = {"data": {"packing": "documents"}}
CASES: dict[str, dict[str, Any]] = {
    "one document": {"model": {"tie_word_embeddings": True}},
    "an odd length": {"train": {"seq_len": 23}},
    "documents": PACKED,
    "a window": {"name": "mistral", "train": {"seq_len": 40}},
    "experts in documents": {"name": "qwen3_moe", **PACKED},
    "experts": {"name": "mixtral"},
    "learned positions": {"name": "gpt2"},
    "learned positions in documents": {"name": "gpt2", **PACKED},
    "few kv heads": {"model": {"num_attention_heads": 8, "num_key_value_heads": 1}},
    "recomputation": {"recompute": {"mode": "full"}, "offload": {"activations": "cpu"}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "gather": GATHER,
    "ulysses": ULYSSES,
    "gather cp4": GATHER | {"cp": 4},
    "ulysses cp4": ULYSSES | {"cp": 4},
    "cp3, which divides neither heads nor rows": {"cp": 3},
    "tp2 sp": GATHER | {"tp": 2, "sequence_parallel": True},
    "ulysses tp2": ULYSSES | {"tp": 2},
    "pp2 zb": GATHER | {"pp": 2, "schedule": "zb-h1"},
    "dp2 zero3": ULYSSES | {"dp": 2, "zero": 3},
    "zero2": GATHER | {"zero": 2},
}
CHOSEN = [
    ("one document", "pp2 zb"),
    ("an odd length", "tp2 sp"),
    ("documents", "gather cp4"),
    ("a window", "gather"),
    ("experts", "cp3, which divides neither heads nor rows"),
    ("learned positions in documents", "zero2"),
    ("few kv heads", "ulysses cp4"),
    ("recomputation", "ulysses"),
]


def options_of(case: str) -> dict[str, Any]:
    """Returns the sections of a run's configuration that a case changes."""
    options = dict(CASES[case])
    if name := options.pop("name", ""):
        shape = ModelConfig.from_json(ENTRIES[name].make_config().to_dict()).model_dump(mode="json")
        options["model"] = shape | {"vocab_size": 0, "initializer_range": 0.05}
    train: dict[str, Any] = {"steps": STEPS, "eval_rows": 3, "eval_every": STEPS} | options.pop("train", {})
    return options | {"train": train}


def evaluations(run: Path) -> list[float]:
    """Returns the losses of a run's evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("case", "where"),
    [
        pytest.param(case, where, marks=() if (case, where) in CHOSEN else pytest.mark.matrix)
        for case in CASES
        for where in LAYOUTS
    ],
)
def test_every_rank_has_the_model_of_one_process(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, case: str, where: str
) -> None:
    options, layout = options_of(case), dict(LAYOUTS[where])
    gradients = str(tmp_path / "gradients.npy")
    expected = run_training(configure("one", **options), gradients=gradients)
    mine = configure("cp", **options)
    mine["zero"] |= {"stage": layout.pop("zero", 0)}
    mine["parallel"] = {"dp": 1} | layout
    num_ranks = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    for result in rank_pool.run(run_training, num_ranks, config=mine, gradients=gradients):
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(result["grad_norm"], expected["grad_norm"], rtol=1e-4)
        np.testing.assert_allclose(result["balance_loss"], expected["balance_loss"], rtol=1e-5)
        assert result["gradients"] <= 1e-5, result["parameter"]
    one, cp = (evaluations(tmp_path / run) for run in ("one", "cp"))
    np.testing.assert_allclose(cp, one, rtol=1e-5)
    assert len(one) == 1


def step_of(config: dict[str, Any]) -> dict[str, Any]:
    """Makes one step; returns the numbers of tokens, of this rank's targets, and the checksum of routing."""
    trainer = make_trainer(config, resume="never")
    for stage in trainer.pipeline.stages:
        stage.record_routing = True
    micro_batches = trainer._batch(trainer.inputs.train, 0, config["train"]["global_batch_size"])
    targets = sum(int((rows.on(trainer.device)["targets"] >= 0).sum()) for rows in micro_batches)
    result = trainer.step()
    routing = float(trainer.pipeline.routing())
    return {"tokens": result.num_tokens, "targets": targets, "routing": routing, "loss": result.loss}


def test_tokens_and_routes_are_counted_once(rank_pool: RankPool, configure: Configure) -> None:
    """The number of tokens divides the loss: a rank that counts its rows' targets again makes it smaller."""
    options = options_of("experts in documents")
    one = step_of(configure("one", **options))
    found = rank_pool.run(step_of, 4, config=configure("cp", **options, parallel={"cp": 4, "dp": 1}))
    assert {each["tokens"] for each in found} == {one["tokens"]}
    assert sum(each["targets"] for each in found) == one["tokens"] == one["targets"]
    assert sum(each["routing"] for each in found) == one["routing"]
    assert [each["loss"] for each in found] == pytest.approx([one["loss"]] * 4, rel=1e-6)


def kept_bytes(config: dict[str, Any]) -> int:
    """Returns the bytes that a forward pass keeps for its backward, beside parameters."""
    trainer = make_trainer(config, resume="never")
    held = {parameter.untyped_storage().data_ptr() for stage in trainer.stages for parameter in stage.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage
        return tensor

    stage = trainer.pipeline.stages[0]
    stage.micro_batches = trainer._batch(trainer.inputs.train, 0, config["train"]["global_batch_size"])
    stage.loss_waits = True  # the head keeps its input, not the gradient of its weight, which all ranks have
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = stage.forward(0, None)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_a_rank_of_four_keeps_a_quarter_of_the_memory(rank_pool: RankPool, configure: Configure, mode: str) -> None:
    options = {"model": {"num_hidden_layers": 8, "max_position_embeddings": 256}, "train": {"seq_len": 256}}
    one = kept_bytes(configure("one", **options))
    config = configure("cp", **options, parallel={"cp": 4, "cp_mode": mode})
    run = prepare_run(parse(config, TrainConfig, "test"), None)
    planned = stage_bytes(run.shape, Stage(range(8)))
    for kept in rank_pool.run(kept_bytes, 4, config=config):
        assert kept <= 0.27 * one
        assert kept == pytest.approx(planned, rel=0.03)


def count_messages_and_pairs(config: dict[str, Any]) -> dict[str, int]:
    """Makes one step; returns the bytes that this rank sent to others for attention, and its query-key pairs."""
    trainer = make_trainer(config, resume="never")
    group, sent, pairs = trainer.mesh.cp, 0, 0

    def counted(rows: torch.Tensor, counts: Sequence[int], *others: Any) -> PendingResult:
        nonlocal sent
        sent += rows[0].nbytes * (sum(counts) - counts[group.rank])
        return start_all_to_all(rows, counts, *others)

    def attended(qkv: Tensors, tiles: Sequence[AttentionTile], *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal pairs
        pairs += qkv[0].shape[1] * sum(tile.num_pairs for tile in tiles)
        return attend_tiles(qkv, tiles, *others)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("tk.train.context.gather", "tk.parallel.row_exchange"):
            patch.setattr(f"{module}.start_all_to_all", counted)
        patch.setattr("tk.train.context.tiled_attention.attend_tiles", attended)
        trainer.step()
    return {"sent": sent, "pairs": pairs}


@pytest.mark.parametrize(("mode", "window"), [("gather", None), ("gather", 6), ("ulysses", None)])
def test_messages_are_the_planned_ones(
    rank_pool: RankPool, configure: Configure, mode: Mode, window: int | None
) -> None:
    model = {"architecture": "mistral", "sliding_window": window}
    config = configure("cp", model=model, parallel={"cp": 2, "cp_mode": mode}, recompute={"mode": "selective"})
    run = prepare_run(parse(config, TrainConfig, "test"), None)
    planned = run.bytes_by_mode()[mode]
    assert planned == sum(each.wire_bytes for each in run.traffic() if each.axis == "cp") > 0
    sent = [each["sent"] for each in rank_pool.run(count_messages_and_pairs, 2, config=config)]
    if mode == "ulysses":
        assert sent == [planned] * 2
    elif window:  # rank 0 has the first half of a row, and fetches no keys
        assert sum(sent) == planned
    else:  # rank 1 has no queries that see the tail, which is on rank 0
        assert sum(sent) == 2 * planned * 3 // 4


def test_ranks_compute_as_many_query_key_pairs(rank_pool: RankPool, configure: Configure) -> None:
    """16 blocks of 128 positions per rank: at most 1.02 of the mean, counted where tiles are computed."""
    model = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    train = {"seq_len": 4096, "micro_batch_size": 1, "global_batch_size": 1}
    config = configure("cp", model=model, train=train, parallel={"cp": 2, "cp_mode": "gather"}, **PACKED)
    pairs = [each["pairs"] for each in rank_pool.run(count_messages_and_pairs, 2, config=config)]
    assert max(pairs) <= 1.02 * sum(pairs) / 2
    assert min(pairs) > 0


def test_heads_that_ulysses_cannot_split_are_refused_before_the_run(configure: Configure) -> None:
    config = parse(configure("run", parallel=ULYSSES | {"cp": 3}), TrainConfig, "test")
    with pytest.raises(ParallelError, match=r"\[parallel\] cp_mode = \"ulysses\" .* heads % cp = 4 % 3"):
        make_plan(config, None)
