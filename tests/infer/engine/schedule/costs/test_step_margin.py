"""The margin below the bound on steps, on machines whose durations vary in a known way."""

import random
from statistics import NormalDist

import pytest

from tk.infer.engine.schedule.costs.step_margin import StepMargin

BOUND = 0.05


def run(margin: StepMargin, spread: float, steps: int = 4000) -> list[bool]:
    """Plans full steps, whose durations are spread around the predicted ones; returns which passed the bound."""
    draw, passed = random.Random(0), []
    for _ in range(steps):
        predicted = BOUND / margin.factor
        seconds = predicted * draw.gauss(1.0, spread)
        passed.append(seconds > BOUND)
        margin.observe(predicted, seconds, BOUND)
    return passed


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.15])
def test_one_full_step_in_a_hundred_passes_the_bound(spread: float) -> None:
    margin = StepMargin()
    passed = run(margin, spread)
    assert sum(passed[:20]) >= 2, "a mean is passed by half of the steps"
    assert sum(passed[500:]) / len(passed[500:]) == pytest.approx(0.01, abs=0.004)
    assert margin.factor == pytest.approx(NormalDist(1.0, spread).inv_cdf(0.99), abs=0.07)


def test_it_follows_a_machine_that_becomes_calm_and_has_a_limit() -> None:
    margin = StepMargin()
    run(margin, 2.0)
    assert margin.factor == pytest.approx(1.5, abs=0.1)
    run(margin, 0.01)
    assert margin.factor < 1.1


def test_short_steps_say_nothing() -> None:
    margin = StepMargin()
    for _ in range(100):
        margin.observe(0.7 * BOUND, 10.0, BOUND)
    assert margin.factor == 1.0
    margin.observe(0.8 * BOUND, 10.0, BOUND)
    assert margin.factor == pytest.approx(1.0198)
