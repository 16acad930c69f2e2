"""The passes of a step on a pipeline of one rank: loss and gradients of every schedule, and what the engine is called
for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tk.core.config import parse
from tk.core.layout import Layout
from tk.core.places import Coordinates
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.parallel.weight_grads import WeightGradQueue
from tk.tests.train.engine.small_decoders import (
    CPU,
    LENGTH,
    VOCAB,
    fill,
    make_config,
    make_mesh,
    make_stages,
    micro_batch,
)
from tk.train.config.train_config import TrainConfig
from tk.train.engine.attention import causal_attention
from tk.train.engine.passes import Passes
from tk.train.engine.training_engine import TrainingEngine, TrainingOptions

BATCH = [micro_batch(seed) for seed in range(3)]


def make_passes(schedule: str = "1f1b", on_phase: Callable[[str], None] = lambda phase: None, **changes: Any) -> Passes:
    """Returns the passes of one rank without peers, over the whole model."""
    data = {
        "train": {"seq_len": LENGTH, "micro_batch_size": 2, "global_batch_size": 6},
        "parallel": {"schedule": schedule},
        "checkpoint": {"dir": "unused"},
    }
    config = parse(data, TrainConfig, "test")
    mesh, queue = make_mesh(Layout()), WeightGradQueue()
    table, stages = make_stages(make_config(**changes), mesh, queue)
    options = TrainingOptions(config.optimizer, config.precision)
    engine = TrainingEngine(stages, table, mesh, options, device=CPU, fill=fill)
    return Passes(stages, engine, config, queue, on_phase)


def losses(passes: Passes) -> torch.Tensor:
    """Returns the summed loss of BATCH by torch's cross entropy, in one forward pass."""
    decoder = passes.stages[0].decoder
    inputs, targets = (
        torch.cat([torch.from_numpy(getattr(micro, name)) for micro in BATCH]) for name in ("inputs", "targets")
    )
    hidden = decoder(inputs, torch.arange(LENGTH).expand(6, LENGTH), causal_attention)
    return F.cross_entropy(decoder.logits(hidden).view(-1, VOCAB), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_losses_and_gradients_are_those_of_one_backward_over_all_rows(schedule: str) -> None:
    passes = make_passes(schedule)
    buckets = passes.engine.buffers.buckets
    expected = losses(passes) * 0.125
    wanted = torch.autograd.grad(expected, [parameter for bucket in buckets for parameter in bucket.parameters])
    passes.engine.begin_step()
    found = passes.train(passes.pack(BATCH), 0.125)
    passes.engine.finish_backward()
    torch.testing.assert_close(found.float(), expected.detach())
    grads = [view for bucket in buckets for view in bucket.views(bucket.sum.read(0, bucket.plan.size))]
    for grad, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)


def test_an_evaluation_has_the_plain_loss_and_leaves_gradients_alone() -> None:
    passes = make_passes()
    passes.engine.begin_step()
    with torch.no_grad():
        found = passes.evaluate(passes.pack(BATCH))
    torch.testing.assert_close(found.float(), losses(passes).detach())
    assert float(passes.engine.finish_backward()) == 0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1f1b", ["backward", "gradients", "last backward", "last gradients"]),
        ("zb-h1", ["backward of inputs", "gradients", "backward of inputs", "last gradients"]),
    ],
)
def test_the_engine_learns_where_passes_begin_and_end(
    schedule: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, calls = make_passes(schedule), list[str]()

    def begin_backward(stage: int, *, last: bool, complete: bool = True) -> None:
        calls.append(f"{'last ' * last}backward{' of inputs' * (not complete)}")

    def gradients_arrived(stage: int, *, last: bool) -> None:
        calls.append(f"{'last ' * last}gradients")

    monkeypatch.setattr(passes.engine, "begin_backward", begin_backward)
    monkeypatch.setattr(passes.engine, "end_pass", lambda stage: calls.append("end pass"))
    monkeypatch.setattr(passes.engine, "gradients_arrived", gradients_arrived)
    passes.train(passes.pack(BATCH[:2]), 1.0)
    first, second, third, fourth = expected
    assert calls == ["end pass", first, "end pass", second, "end pass", third, "end pass", fourth]


def test_phases_name_each_action() -> None:
    phases: list[str] = []
    passes = make_passes(on_phase=phases.append)
    passes.train(passes.pack(BATCH[:2]), 1.0)
    assert phases == [f"{kind} stage 0 micro-batch {number}" for number in range(2) for kind in ("forward", "backward")]


def test_the_balance_of_experts_is_that_of_the_newest_step() -> None:
    passes = make_passes(architecture="mixtral", num_local_experts=4, router_aux_loss_coef=0.1)
    passes.engine.begin_step()
    passes.train(passes.pack(BATCH), 1.0)
    first = float(passes.balance_loss())
    passes.engine.begin_step()
    passes.train(passes.pack(BATCH), 1.0)
    assert float(passes.balance_loss()) == first, "and not the sum of both"
    assert 6 * 2 <= first * 1.2 < 6 * 4 * 1.2, "6 sequences; 2 if balanced over top_k = 2, at most the 4 experts"
    assert make_passes().balance_loss() == passes.z_loss() == 0


@pytest.mark.parametrize(("pp", "tp", "expected"), [(0, 0, False), (1, 0, True), (1, 1, False)])
def test_one_of_the_ranks_that_see_the_same_rows_counts_the_loss(pp: int, tp: int, expected: bool) -> None:
    passes = make_passes()
    passes.mesh = Mesh(
        Layout(pp=2, tp=2), Coordinates(pp, 0, 0, tp), ALONE, Group(None, pp, 2), ALONE, ALONE, Group(None, tp, 2)
    )
    assert passes.is_loss_rank == expected
