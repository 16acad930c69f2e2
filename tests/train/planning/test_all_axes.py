"""Plans of layouts with every axis."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ParallelError
from tk.core.layout import Layout
from tk.core.progress import format_bytes
from tk.model.registry import decoder_spec
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.planning.plan import RunPlan, make_plan
from tk.train.planning.plan_text import describe

PlanAt = Callable[..., RunPlan]
EXPERTS = {"architecture": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4}


@pytest.fixture
def plan_at(configure: Configure) -> PlanAt:
    def plan(layout: Layout, inner: int = 512, **sections: dict[str, Any]) -> RunPlan:
        model = EXPERTS | {"intermediate_size": inner, "hidden_size": 128}
        found = make_plan(parse(configure(model=model, **_keys(layout), **sections), TrainConfig, "test"), None)
        assert found.layout == layout
        return found

    return plan


def _keys(layout: Layout) -> dict[str, dict[str, int]]:
    """Returns the keys of a configuration that say a layout."""
    axes = ("tp", "pp", "dp", "cp", "ep", "expert_tp")
    zero = {"stage": layout.zero, "shard_size": layout.shard_size, "bucket_size": layout.bucket_size}
    return {"parallel": {axis: getattr(layout, axis) for axis in axes}, "zero": zero}


@pytest.mark.parametrize(
    ("layout", "experts_over"),
    [
        (Layout(dp=2, cp=2, zero=1, bucket_size=2**20), 4),
        (Layout(dp=2, cp=2, ep=4, zero=1, bucket_size=2**20), 4),
        (Layout(tp=2, dp=2, cp=2, ep=4, zero=1, bucket_size=2**20), 8),
        (Layout(tp=2, dp=2, cp=2, ep=2, expert_tp=2, zero=1, bucket_size=2**20), 8),
        (Layout(tp=2, dp=4, ep=8, zero=1, shard_size=2, bucket_size=2**20), 8),
        (Layout(tp=2, dp=4, ep=2, zero=1, shard_size=2, bucket_size=2**20), 4),
    ],
    ids=str,
)
def test_states_are_shared_over_the_ranks_of_each_family(plan_at: PlanAt, layout: Layout, experts_over: int) -> None:
    """`experts_over` ranks have one copy of an expert's states; so experts need no more memory at a larger ep."""
    plan = plan_at(layout)
    table = decoder_spec(plan.model).table
    experts = sum(math.prod(spec.shape) for spec in table if spec.expert is not None)
    dense = sum(math.prod(spec.shape) for spec in table if spec.expert is None)
    states = 8 * (dense / (layout.group_size * layout.tp) + experts / experts_over)
    assert plan.memory[0].device["optimizer"] == pytest.approx(states, rel=0.04), "norms are on every rank of tp"
    weights = 4 * (dense / layout.tp + experts / (layout.ep * layout.experts.tp))
    assert plan.memory[0].device["parameters"] == pytest.approx(weights, rel=0.04)


def test_the_copy_for_saves_is_a_ranks_share_of_both_families(plan_at: PlanAt) -> None:
    layout = Layout(tp=2, dp=2, cp=2, ep=4, zero=1)
    plan = plan_at(layout, checkpoint={"every": 5})
    size = plan.memory[0].host["copy for saves"]
    assert size == pytest.approx(12 * plan.num_parameters / layout.world_size, rel=0.1)


def test_the_text_names_every_axis_and_what_each_family_exchanges(plan_at: PlanAt) -> None:
    plan = plan_at(Layout(tp=2, pp=2, dp=2, cp=2, ep=2, zero=1), train={"global_batch_size": 8, "micro_batch_size": 1})
    assert plan.num_micro_batches == 8 // 2, "rows are dealt over dp alone"
    text = describe(plan)
    assert "tp 2 x pp 2 x dp 2 x cp 2 = 16 ranks, ZeRO-1, experts ep 2 x tp 1" in text
    found = {(each.axis, each.collective): each for each in plan.traffic if each.axis not in ("tp", "pp", "cp", "ep")}
    assert set(found) == {(axis, way) for axis in ("dp x cp", "edp") for way in ("reduce_scatter", "all_gather")}
    assert [found[axis, "all_gather"].ranks for axis in ("dp x cp", "edp")] == [4, 4]
    with_ep_1 = describe(plan_at(Layout(tp=2, dp=2, zero=1)))
    assert "tp 2 x dp 2 = 4 ranks, ZeRO-1\n" in with_ep_1


def test_experts_on_different_ranks_exchange_tokens_and_leave_tp_its_attention(plan_at: PlanAt) -> None:
    rows = {"train": {"global_batch_size": 8, "micro_batch_size": 2}}
    plan = plan_at(Layout(tp=2, dp=2, ep=2), **rows)
    found = {(each.axis, each.collective): each for each in plan.traffic if each.axis in ("tp", "ep")}
    passes = 4 * 2  # layers, micro-batches
    hidden = 2 * plan.tokens_per_step // 8 * 128 * 4  # of a micro-batch of two rows, in fp32
    assert (found["ep", "all_to_all"].calls, found["ep", "all_to_all"].ranks) == (4 * passes, 2)
    assert found["ep", "all_to_all"].message_bytes == hidden, "half of the tokens, each for two experts"
    assert (found["tp", "all_gather"].calls, found["tp", "all_gather"].message_bytes) == (2 * passes, hidden)
    assert found["tp", "all_reduce"].calls == 2 * passes, "attention's, forward and backward"
    (split,) = (each for each in plan_at(Layout(tp=2, dp=2), **rows).traffic if each.axis == "tp")
    assert split.calls == 4 * passes
    again = plan_at(Layout(tp=2, dp=2, ep=2, expert_tp=2), recompute={"mode": "full"}, **rows).traffic
    calls = {(each.axis, each.collective): (each.calls, each.message_bytes) for each in again}
    assert calls["ep", "all_to_all"] == (6 * passes, 2 * hidden), "for the tokens of both ranks of an expert"
    assert calls["expert_tp", "all_gather"] == calls["expert_tp", "reduce_scatter"] == (3 * passes, hidden)


def test_experts_keep_the_same_for_as_many_pairs_wherever_they_are(plan_at: PlanAt) -> None:
    def kept(layout: Layout) -> int:
        activations: int = plan_at(layout).memory[0].device["activations"]
        return activations

    assert kept(Layout(dp=4, ep=4)) == kept(Layout(dp=4)) == kept(Layout(dp=4, ep=4, zero=1))
    tokens, dealt, split = 2 * 24, kept(Layout(tp=2, dp=2, ep=2)), kept(Layout(tp=2, dp=2))
    assert split - dealt >= 4 * tokens // 2 * 2 * 2 * 128 * 4, "half of the pairs, of whole experts"


@pytest.mark.parametrize(("recompute", "rounds"), [("none", 3 * 4), ("selective", 1.25), ("full", 0.25)])
def test_a_hot_expert_costs_memory_only_without_recomputation(plan_at: PlanAt, recompute: str, rounds: float) -> None:
    """At ep 4: three times as many pairs as at balance in each of four layers, or one round, 1.25 times as large."""
    plan = plan_at(Layout(dp=4, ep=4), recompute={"mode": recompute})
    pairs = 2 * plan.tokens_per_step // 6 * 2  # of micro-batches of two rows
    more = format_bytes(round(rounds * pairs * (5 * 512 + 128) * 4))
    (note,) = (note for note in plan.notes if "all tokens choose" in note)
    assert f"has {more} more" in note
    assert ("with [recompute]" in note) == (recompute == "none")
    assert not any("all tokens choose" in note for note in plan_at(Layout(dp=4, expert_tp=2)).notes)


def test_an_ep_that_does_not_divide_the_experts_is_a_problem_of_the_plan(plan_at: PlanAt) -> None:
    with pytest.raises(
        ParallelError, match=r"num_experts % ep = 8 % 3 = 2, and it must be 0.*Use a divisor of 8 as ep"
    ):
        plan_at(Layout(dp=3, ep=3))


def test_experts_that_tp_does_not_cut_may_have_any_size(plan_at: PlanAt) -> None:
    with pytest.raises(ParallelError, match="intermediate size of an expert % tp = 131 % 2 = 1"):
        plan_at(Layout(tp=2), inner=131)
    assert plan_at(Layout(tp=2, ep=2), inner=131).layout.experts.tp == 1


AT_SCALE = """
import json, sys, time
from pathlib import Path
from tk.core.config import parse
from tk.train.config.train_config import TrainConfig
from tk.train.planning.plan import make_plan
from tk.train.planning.plan_text import describe
config = parse(json.loads(sys.argv[1]), TrainConfig, "test")
seconds = []
while len(seconds) < 3 and min(seconds, default=1) >= 0.5:  # neighbours on a core slow it
    start = time.process_time()
    text = describe(make_plan(config, None))
    seconds.append(time.process_time() - start)
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(json.dumps({"seconds": min(seconds), "MiB": int(peak) / 2**10}))
assert "= 16384 ranks" in text and "torch" not in sys.modules, text
"""


def test_a_plan_of_16384_ranks_takes_half_a_second(configure: Configure) -> None:
    """Of a processor, and 80 MiB with imports, for a model of 36,945 tensors (the shape of Qwen3-235B-A22B)."""
    model = {"architecture": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 1536, "num_hidden_layers": 94}
    model |= {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
    model |= {"num_local_experts": 128, "num_experts_per_tok": 8}
    layout = Layout(tp=8, pp=8, dp=64, cp=4, ep=8, zero=1)
    config = configure(model=model, train={"global_batch_size": 1024, "micro_batch_size": 1}, **_keys(layout))
    found = subprocess.run(
        [sys.executable, "-c", AT_SCALE, json.dumps(config)], capture_output=True, text=True, check=True
    )
    taken = json.loads(found.stdout)
    assert taken["seconds"] < 0.5
    assert taken["MiB"] < 80
