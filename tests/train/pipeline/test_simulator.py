"""The simulator: times, bubbles and memory equal the papers' formulas exactly, and deadlocks are reported."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import ParallelError
from tk.tests.example_counts import examples
from tk.tests.train.pipeline.test_schedules import any_schedule
from tk.train.pipeline.actions import Action, Schedule
from tk.train.pipeline.schedules import make_schedule
from tk.train.pipeline.simulator import Costs, simulate

RANKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 30)


@examples(80)
@given(any_schedule(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_no_schedule_deadlocks_and_no_rank_does_two_things_at_once(
    schedule: Schedule, forward: int, backward_input: int, backward_weight: int, communication: int
) -> None:
    costs = Costs.uniform(schedule.num_stages, forward, backward_input, backward_weight, communication)
    result = simulate(schedule, costs)
    assert set(result.ends) == {action for actions in schedule.ranks for action in actions}
    for rank, actions in enumerate(schedule.ranks):
        end = 0.0
        for action in actions:
            begin = result.ends[action] - costs.of(action)
            assert begin >= end
            for dependency in schedule.dependencies(action):
                away = communication if schedule.rank_of(dependency.stage) != rank else 0
                assert begin >= result.ends[dependency] + away
            end = result.ends[action]
    assert 0 <= result.bubble < 1
    assert result.makespan == max(result.ends.values())


@examples(50)
@given(RANKS, MICRO_BATCHES, st.integers(1, 9), st.integers(1, 9))
def test_gpipe_and_1f1b_have_the_known_bubble(pp: int, m: int, forward: int, backward: int) -> None:
    """(pp - 1) / (m + pp - 1), for any duration of forward and backward (arXiv 2104.04473, section 2.2.1)."""
    costs = Costs.uniform(pp, forward, backward, backward)
    for name in ("gpipe", "1f1b"):
        result = simulate(make_schedule(name, pp, 1, m), costs)
        assert result.makespan == (m + pp - 1) * (forward + 2 * backward)
        assert result.bubble == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-12)


@examples(50)
@given(st.integers(2, 8), st.integers(2, 4), st.integers(0, 20))
def test_interleaving_divides_the_bubble_by_the_virtual_stages(pp: int, v: int, more: int) -> None:
    """The time lost is pp - 1 times a chunk's forward and backward, also if pp does not divide the micro-batches."""
    m = pp + more
    result = simulate(make_schedule("interleaved", pp, v, m))
    assert result.makespan - result.busy[0] == (pp - 1) * 3
    assert result.bubble == pytest.approx((pp - 1) / (v * m + pp - 1), abs=1e-12)


@examples(50)
@given(st.integers(2, 8), st.integers(0, 20), st.integers(1, 9))
def test_zero_bubble_h1_loses_the_time_of_its_paper(pp: int, more: int, cost: int) -> None:
    """(pp - 1)(F + I - W) (arXiv 2401.10241, section 2.3), where F = I = W and there are pp micro-batches or more."""
    result = simulate(make_schedule("zb-h1", pp, 1, pp + more), Costs.uniform(pp, cost, cost, cost))
    assert result.makespan - result.busy[0] == (pp - 1) * cost


@examples(50)
@given(st.integers(2, 8), MICRO_BATCHES)
def test_zero_bubble_h1_is_faster_than_1f1b_at_its_peak_memory(pp: int, m: int) -> None:
    zero_bubble, plain = (simulate(make_schedule(name, pp, 1, m)) for name in ("zb-h1", "1f1b"))
    assert zero_bubble.bubble < plain.bubble
    assert max(zero_bubble.peak_in_flight) == max(plain.peak_in_flight)


@examples(50)
@given(RANKS, MICRO_BATCHES)
def test_activations_in_flight(pp: int, m: int) -> None:
    assert simulate(make_schedule("gpipe", pp, 1, m)).peak_in_flight == (m,) * pp
    assert simulate(make_schedule("1f1b", pp, 1, m)).peak_in_flight == tuple(min(m, pp - r) for r in range(pp))
    assert simulate(make_schedule("zb-h1", pp, 1, m)).peak_in_flight == (min(m, pp),) * pp
    assert simulate(make_schedule("forward-only", pp, 1, m)).peak_in_flight == (1,) * pp


@examples(50)
@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 5))
def test_activations_in_flight_when_interleaved(pp: int, v: int, groups: int) -> None:
    """pp x v chunks' worth of 1f1b's, and (pp - 1) / (pp v) more of them (arXiv 2205.05198, section 4.2.3)."""
    peak = simulate(make_schedule("interleaved", pp, v, groups * pp)).peak_in_flight
    assert peak == tuple(min(groups * pp * v, (v - 1) * pp + 2 * (pp - r - 1) + 1) for r in range(pp))


def test_a_slow_stage_and_a_slow_wire_are_counted() -> None:
    costs = Costs(forward=[1, 2], backward_input=[1, 2], backward_weight=[1, 2], communication=0.5)
    result = simulate(make_schedule("1f1b", 2, 1, 1), costs)
    assert result.makespan == 1 + 0.5 + 2 + 4 + 0.5 + 2
    assert list(result.busy) == [3, 6]
    assert list(result.rank_bubbles) == pytest.approx([0.7, 0.4])


def test_ranks_that_wait_for_each_other_are_named() -> None:
    schedule = make_schedule("1f1b", 2, 1, 2)
    first, second = schedule.ranks
    swapped = replace(schedule, ranks=(first, (second[2], second[3], second[0], second[1])))
    stuck = replace(swapped, ranks=((first[0], first[2], first[1], first[3]), swapped.ranks[1]))
    message = (
        "rank 0, at backward stage 0 micro-batch 0, waits for backward stage 1 micro-batch 0 of rank 1; "
        "rank 1, at forward stage 1 micro-batch 1, waits for forward stage 0 micro-batch 1 of rank 0"
    )
    with pytest.raises(ParallelError, match=re.escape(message)):
        simulate(stuck)
    assert simulate(swapped).makespan > simulate(schedule).makespan, "an unusual order alone is no deadlock"


def test_an_action_that_no_rank_has_is_named() -> None:
    schedule = make_schedule("gpipe", 2, 1, 1)
    nothing: tuple[Action, ...] = ()
    lost = replace(schedule, ranks=(nothing, schedule.ranks[1]))
    with pytest.raises(ParallelError, match="waits for forward stage 0 micro-batch 0 which rank 0 lacks"):
        simulate(lost)


def test_the_documented_figures_are_those_of_the_simulator() -> None:
    """docs/pipeline.md: schedule, virtual stages, and for 8 and 32 micro-batches bubble and memory, on 4 ranks."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "pipeline.md").read_text()
    rows = re.findall(r"^\| (gpipe|1f1b|interleaved|zb-h1) \| (\d) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for name, virtual_stages, figures in rows:
        expected = []
        for m in (8, 32):
            result = simulate(make_schedule(name, 4, int(virtual_stages), m))
            expected += [f"{result.bubble:.1%}", f"{max(result.peak_in_flight) / int(virtual_stages):g}"]
        assert figures.replace(" %", "%").split(" | ") == expected, name
