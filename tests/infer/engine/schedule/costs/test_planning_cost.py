"""The cost of waiting for the results of proposals, as it is learned from steps."""

import pytest

from tk.infer.engine.schedule.costs.planning_cost import PlanningCost


def test_it_is_learned_from_steps_with_proposals_beside_those_without() -> None:
    cost = PlanningCost()
    assert cost.overhead == 0.05
    for _ in range(60):
        cost.observe(10.0, 9.0, False)
        cost.observe(12.0, 13.5, True)
    assert cost.overhead == pytest.approx(0.25, abs=0.02)


def test_a_disturbed_step_counts_little() -> None:
    cost = PlanningCost()
    cost.observe(10.0, 10.0, False)
    cost.observe(10.0, 10_000.0, False)
    cost.observe(10.0, 10_000.0, True)
    assert cost.overhead < 0.15
    cost.observe(10.0, 1e-6, True)
    assert cost.overhead >= 0


def test_without_a_step_that_has_none_nothing_is_learned() -> None:
    cost = PlanningCost()
    cost.observe(10.0, 30.0, True)
    assert cost.overhead == 0.05


def test_a_high_cost_is_forgotten_so_that_proposals_are_tried_again() -> None:
    cost = PlanningCost()
    cost.observe(10.0, 10.0, False)
    for _ in range(100):
        cost.observe(10.0, 20.0, True)
    assert cost.overhead > 0.9
    for _ in range(2000):
        cost.observe(10.0, 10.0, False)
    assert cost.overhead < 0.1
