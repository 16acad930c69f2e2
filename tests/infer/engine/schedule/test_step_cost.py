"""The predicted duration of steps, and the margin below a bound, on machines whose true costs are known."""

import random
from statistics import NormalDist

import pytest

from tk.infer.engine.schedule.step_cost import StepBudget, StepCost, StepSize
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.worker.step_timing import warm_up_chunks

LIMITS = Limits(8, 100, 512, 4096)
BOUND = 0.05
MACHINES = [(5e-3, 4e-4, 2e-8), (2e-2, 1e-3, 1e-7), (1e-3, 1e-3, 1e-6), (1e-2, 1e-4, 0.0)]


def seconds(machine: tuple[float, float, float], size: StepSize) -> float:
    a, b, c = machine
    return a + b * size.num_tokens + c * size.num_keys


def measured(machine: tuple[float, float, float]) -> StepCost:
    sizes = [StepSize().plus(chunk.start, chunk.length) for chunk in warm_up_chunks(LIMITS, 128, 32)]
    cost = StepCost()
    cost.calibrate((size, seconds(machine, size)) for size in sizes)
    return cost


def test_a_size_counts_the_keys_up_to_each_token() -> None:
    size = StepSize().plus(0, 3).plus(10, 2)
    assert (size.num_tokens, size.num_keys) == (5, 1 + 2 + 3 + 11 + 12)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_few_steps_at_start_give_the_cost(machine: tuple[float, float, float]) -> None:
    cost = measured(machine)
    for start, length in ((0, 1), (0, 100), (0, 512), (1000, 1), (2000, 200)):
        size = StepSize().plus(start, length)
        assert cost.seconds(size) == pytest.approx(seconds(machine, size), rel=0.1)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_cost_follows_a_machine_that_becomes_slower(machine: tuple[float, float, float]) -> None:
    cost = measured(machine)
    slower = (machine[0] * 2, machine[1] * 2, machine[2] * 2)
    size = StepSize().plus(100, 128)
    for _ in range(60):
        cost.observe(size, seconds(slower, size))
    assert cost.seconds(size) == pytest.approx(seconds(slower, size), rel=0.1)


def test_one_hiccup_changes_little_and_an_empty_step_nothing() -> None:
    cost = measured(MACHINES[0])
    size = StepSize().plus(0, 64)
    before = cost.seconds(size)
    cost.observe(size, 60.0)
    assert before < cost.seconds(size) < 1.2 * before
    cost.observe(StepSize(), 1.0)
    assert cost.seconds(size) < 1.2 * before


@pytest.mark.parametrize("start", [0, 700, 3000])
def test_the_longest_chunk_is_the_longest_under_the_bound(start: int) -> None:
    cost = measured(MACHINES[1])
    base = StepSize().plus(50, 1)
    length = cost.longest(base, start, 512, 0.1)
    assert 0 < length < 512
    assert cost.seconds(base.plus(start, length)) <= 0.1 < cost.seconds(base.plus(start, length + 1))
    assert cost.longest(base, start, 5, 0.1) == 5
    assert cost.longest(base, start, 512, 1e-6) == 0


def test_nothing_is_predicted_before_a_step_was_seen() -> None:
    cost = StepCost()
    assert (cost.is_known, cost.seconds(StepSize().plus(0, 10))) == (False, 0.0)
    assert cost.longest(StepSize(), 0, 77, 1e-9) == 77


def test_a_budget_gives_one_prompt_token_beyond_its_bound() -> None:
    budget = StepBudget(16, 1e-6, measured(MACHINES[1]))
    budget.reserve(5, 1)
    assert budget.reserve_prompt(0, 100) == 1
    assert budget.room(0, 100) == 0
    unbounded = StepBudget(16, None, StepCost())
    unbounded.reserve(5, 1)
    assert [unbounded.reserve_prompt(0, 10), unbounded.reserve_prompt(0, 10), unbounded.room(0, 1)] == [10, 5, 0]


def observe_steps(cost: StepCost, spread: float, steps: int = 4000) -> list[bool]:
    """Plans full steps, whose durations are spread around the predicted ones; returns which passed the bound."""
    draw, passed = random.Random(0), []
    for _ in range(steps):
        predicted = BOUND / cost.margin
        seconds = predicted * draw.gauss(1.0, spread)
        passed.append(seconds > BOUND)
        cost.learn_margin(predicted, seconds, BOUND)
    return passed


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.15])
def test_one_full_step_in_a_hundred_passes_the_bound(spread: float) -> None:
    cost = StepCost()
    passed = observe_steps(cost, spread)
    assert sum(passed[:20]) >= 2, "a mean is passed by half of the steps"
    assert sum(passed[500:]) / len(passed[500:]) == pytest.approx(0.01, abs=0.004)
    assert cost.margin == pytest.approx(NormalDist(1.0, spread).inv_cdf(0.99), abs=0.07)


def test_the_margin_follows_a_machine_that_becomes_calm_and_has_a_limit() -> None:
    cost = StepCost()
    observe_steps(cost, 2.0)
    assert cost.margin == pytest.approx(1.5, abs=0.1)
    observe_steps(cost, 0.01)
    assert cost.margin < 1.1


def test_short_steps_say_nothing_about_the_margin() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.learn_margin(0.7 * BOUND, 10.0, BOUND)
    assert cost.margin == 1.0
    cost.learn_margin(0.8 * BOUND, 10.0, BOUND)
    assert cost.margin == pytest.approx(1.0198)
