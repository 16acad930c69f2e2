"""A run that is prepared once has a memory for each choice of places, and on a CPU what malloc holds free beside it."""

from dataclasses import astuple
from typing import Any

import pytest

from tk.core.config import parse
from tk.tests.train.conftest import Configure
from tk.train.config.sections import OffloadSection
from tk.train.config.train_config import TrainConfig
from tk.train.planning.activation_memory import logits_block
from tk.train.planning.model_states import exchange_copies
from tk.train.planning.planned_run import PlannedRun, prepare_run


@pytest.fixture
def run(configure: Configure) -> PlannedRun:
    sections: dict[str, Any] = {"parallel": {"pp": 2}, "zero": {"stage": 1}, "checkpoint": {"every": 5}}
    return prepare_run(parse(configure(precision={"params": "bf16"}, **sections), TrainConfig, "test"), 4)


def test_another_place_changes_only_where_states_are(run: PlannedRun) -> None:
    moved = run.with_offload(OffloadSection(optimizer="cpu"))
    assert run.moved() == ()
    assert sum(sum(astuple(each)[1:]) for each in moved.moved()) > 0
    for before, after in zip(run.memory(), moved.memory(), strict=True):
        assert after.on_cpu == before.on_cpu, "on a CPU it is the same memory"
        assert after.device == {part: size for part, size in before.device.items() if part != "optimizer"}
        assert after.host["optimizer"] == before.device["optimizer"]
        assert after.host["copy for saves"] == before.host["copy for saves"]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_pipeline_rank_may_train_none_of_its_parameters(configure: Configure, zero: int) -> None:
    freeze = ["model.embed_tokens", "model.layers.0"]
    data = configure(parallel={"pp": 2, "dp": 2}, zero={"stage": zero})
    data["train"] |= {"freeze": freeze}
    run = prepare_run(parse(data, TrainConfig, "test"), 4)
    first, last = run.memory()
    assert first.device["gradients"] == 0 < last.device["gradients"]
    frozen = sum(param.size for param in run.ranks[0]) * 4
    assert first.device["frozen parameters"] == pytest.approx(frozen / (2 if zero == 3 else 1), rel=0.01)
    assert "frozen parameters" not in last.device
    assert run.traffic()


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("zb-h1", "none"), ("gpipe", "full")])
def test_activations_on_the_host_leave_a_layer_of_the_device(
    configure: Configure, schedule: str, recompute: str
) -> None:
    sections: dict[str, Any] = {"model": {"num_hidden_layers": 8}, "recompute": {"mode": recompute}}
    data = configure(parallel={"pp": 2, "schedule": schedule}, **sections)
    data["train"] |= {"global_batch_size": 12, "micro_batch_size": 2}
    kept = prepare_run(parse(data, TrainConfig, "test"), 2)
    moved = kept.with_offload(OffloadSection(activations="cpu"))
    hidden = 48 * 32 * 4
    for pp, (before, after) in enumerate(zip(kept.memory(), moved.memory(), strict=True)):
        whole, left = before.device["activations"], after.device["activations"]
        on_host, passes = after.host["offloaded activations"], 6 if schedule == "gpipe" else 2 - pp
        if schedule == "gpipe":
            rotations = 2 * 48 * 8 * 4
            assert whole == on_host + 6 * rotations, "inputs of the head wait, too"
        else:
            assert on_host == whole - hidden * pp * kept.simulation.peak_in_flight[pp], "the head's input stays"
        if schedule == "1f1b":
            assert whole / passes / 5 < left < whole / passes / 3, "a layer of four, and what all of them share"
        elif schedule == "zb-h1":
            assert left > whole / passes, "inputs wait for the weights' gradients"
    assert kept.moved() == ()
    [each] = moved.moved()
    assert (each.part, each.read, each.written) == ("activations", 0, 0)
    assert each.down == each.up > 0


def test_on_a_cpu_malloc_holds_less_free_in_a_run_that_offloads(run: PlannedRun) -> None:
    def free(each: PlannedRun) -> list[int]:
        return [
            whole - placed.on_cpu for placed, whole in zip(each.memory(), each.cpu_memory(each.memory()), strict=True)
        ]

    first, last = free(run)
    assert last > first > 0
    logits = logits_block(run.shape)
    assert free(run.with_offload(OffloadSection(optimizer="disk", buffers=3))) == [0, 4 * logits], "in fp32"


def test_an_mlp_in_blocks_has_the_tokens_of_a_block_from_all_ranks_of_a_split_sequence(configure: Configure) -> None:
    for sections, tokens in (
        ({}, 0),
        ({"recompute": {"mlp_block": 7}}, 7),
        ({"recompute": {"mlp_block": 7}, "parallel": {"tp": 2, "sequence_parallel": True}}, 14),
        ({"recompute": {"mlp_block": 7}, "parallel": {"tp": 2}}, 7),
        ({"recompute": {"mlp_block": 10**6}}, 24),
    ):
        data = configure(**sections)
        data["train"] |= {"micro_batch_size": 3}
        assert prepare_run(parse(data, TrainConfig, "test"), 2).shape.mlp_tokens == 3 * tokens


def test_saves_copy_weights_only_and_states_on_disk_have_a_second_area(run: PlannedRun) -> None:
    on_disk = run.with_offload(OffloadSection(optimizer="disk"))
    for before, after in zip(run.memory(), on_disk.memory(), strict=True):
        assert after.host["copy for saves"] == pytest.approx(before.host["copy for saves"] * 2 / 14, rel=0.2), (
            "alignment"
        )
        assert after.disk["optimizer, for saves"] == after.disk["optimizer"]
        assert "optimizer, for saves" not in before.disk


def test_the_traffic_is_that_of_the_pipeline_rank_with_the_most_parameters(run: PlannedRun) -> None:
    sizes = [sum(param.size for param in params) for params in run.ranks]
    assert sum(param.size for param in run.fullest) == max(sizes)
    assert run.work().families["dense"].num_params >= max(sizes), "with padding"


def test_on_a_cpu_exchanges_take_copies_once_the_blocks_of_products_are_gone(configure: Configure) -> None:
    sections: dict[str, Any] = {"parallel": {"dp": 2}, "zero": {"stage": 3}, "precision": {"params": "bf16"}}
    for seq_len, inner, of_exchanges in ((64, 256, False), (8, 20_000, True)):
        rows = {"seq_len": seq_len, "micro_batch_size": 1}
        config = configure(model={"intermediate_size": inner, "hidden_size": 128}, train=rows, **sections)
        run = prepare_run(parse(config, TrainConfig, "test"), 2)
        copies = exchange_copies(run.config, run.layout, run.ranks[0])
        beside = run.cpu_memory(run.memory())[0] - run.memory()[0].on_cpu
        assert (beside == copies) == of_exchanges
        assert beside >= copies > 0
