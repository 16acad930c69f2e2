"""The traffic of a step, compared with counts and ring formulas by hand."""

import pytest

from tk.core.layout import Layout
from tk.train.planning.traffic import Collective, FamilyWork, StepWork, Traffic, traffic


def test_traffic_is_that_of_the_layout() -> None:
    work = StepWork({"dense": FamilyWork(1000, 900)}, 2, 64, 3, 5, False, False)
    layout = Layout(tp=2, pp=2, dp=4, zero=3, shard_size=2)
    found = {(each.axis, each.collective, each.what): each for each in traffic(layout, work)}
    assert found["tp", "all_reduce", "hidden states"].calls == 4 * 3 * 5
    assert found["tp", "all_reduce", "hidden states"].wire_bytes == 60 * 64  # 2 (N - 1) / N = 1
    assert found["pp", "send", "hidden states and their gradients"].calls == 10
    assert found["dp", "reduce_scatter", "gradients"].wire_bytes == 5 * 4000 // 2
    assert found["dp", "all_gather", "parameters, backward"].message_bytes == 1800
    assert found["dp", "all_reduce", "gradients of replicas"].message_bytes == 2000
    assert traffic(Layout(), work) == []


@pytest.mark.parametrize(
    ("collective", "sent"), [("all_reduce", 1500), ("reduce_scatter", 750), ("all_gather", 750), ("send", 1000)]
)
def test_a_ring_of_four_ranks_sends_its_share(collective: Collective, sent: int) -> None:
    assert Traffic("dp", collective, "values", 4, 10, 100).wire_bytes == sent


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, [("all_reduce", 1, 4000)]),
        (1, [("reduce_scatter", 1, 4000), ("all_gather", 1, 2000)]),
        (2, [("reduce_scatter", 5, 4000), ("all_gather", 1, 2000)]),
        (3, [("reduce_scatter", 5, 4000), ("all_gather", 5, 2000), ("all_gather", 5, 1800)]),
    ],
)
def test_each_stage_of_zero_has_its_collectives(zero: int, expected: list[tuple[str, int, int]]) -> None:
    """1000 parameters in bf16 with gradients in fp32, and 5 micro-batches."""
    work = StepWork({"dense": FamilyWork(1000, 900)}, 2, 64, 3, 5, False, False)
    found = traffic(Layout(dp=4, zero=zero), work)
    assert [(each.collective, each.calls, each.message_bytes) for each in found] == expected
    assert {(each.axis, each.ranks) for each in found} == {("dp", 4)}


def test_frozen_elements_are_gathered_at_stage_3_and_have_no_gradients() -> None:
    work = StepWork({"dense": FamilyWork(100, 1000, 1000)}, 2, 64, 3, 5, False, False)
    found = traffic(Layout(dp=4, zero=3), work)
    assert [(each.what, each.message_bytes) for each in found] == [
        ("gradients", 400),
        ("parameters, forward", 2200),
        ("parameters, backward", 2000),
    ]


@pytest.mark.parametrize(("recompute_full", "passes"), [(False, 2), (True, 3)])
def test_sequence_parallelism_splits_each_all_reduce_and_gathers_once_more(recompute_full: bool, passes: int) -> None:
    work = StepWork({"dense": FamilyWork(1000, 900)}, 2, 64, 3, 5, True, recompute_full)
    gathers, scatters, sends = traffic(Layout(tp=2, pp=2), work)
    blocks = 2 * 3 * 5  # attention and MLP, layers, micro-batches
    assert (gathers.collective, gathers.calls) == ("all_gather", (passes + 1) * blocks)
    assert (scatters.collective, scatters.calls) == ("reduce_scatter", passes * blocks)
    assert sends.message_bytes == 64 // 2
