"""The verdict on a layout: no difference is lost, however odd the numbers are."""

import math

import pytest

from tk.parity.judge import BOUNDS, Result, bounds_for, common_start, compare_curves, finite, relative, worst_first
from tk.parity.layout import ParityLayout
from tk.train.config.sections import OptimizerSection

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("mine", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([-3.0, 0.0], [-2.0, 0.0], 0.5),
        ([1.0, NAN, NAN], [1.0, 0.9, 0.8], INF),
        ([1.0, 0.9], [1.0, NAN], INF),
        ([1.0, INF], [1.0, INF], INF),
        ([0.5], [0.0], INF),
    ],
)
def test_the_largest_difference_of_two_curves(mine: list[float], expected: list[float], difference: float) -> None:
    assert compare_curves(mine, expected) == pytest.approx(difference)


def test_a_layout_whose_loss_becomes_nan_fails() -> None:
    loss = finite(compare_curves([5.0, NAN], [5.0, 4.9]))
    wrong = Result(ParityLayout(tp=2), loss=loss, grad_norm=0.0, gradients=0.0, updates=0.0)
    right = Result(ParityLayout(), loss=1e-6, grad_norm=0.0, gradients=0.0, updates=0.0)
    assert wrong.badness(BOUNDS["fp32"]) == INF
    assert right.badness(BOUNDS["fp32"]) == pytest.approx(0.1)
    assert worst_first([right, wrong], BOUNDS["fp32"]) == [wrong, right]
    assert Result.from_json(wrong.to_json()) == wrong


def test_a_ratio_is_never_nan() -> None:
    assert [relative(0.0, 0.0), relative(1.0, 0.0), relative(NAN, 1.0), relative(1.0, NAN)] == [0.0, INF, INF, INF]


def test_the_common_start_of_two_curves() -> None:
    assert [common_start([1.0, 2.0], [1.0, end]) for end in (2.0, 3.0)] == [2, 1]


def test_updates_are_judged_where_adam_does_not_enlarge_rounding() -> None:
    options = OptimizerSection(eps=1e-6)
    assert bounds_for("fp32", options) == BOUNDS["fp32"]
    moved = Result(ParityLayout(tp=2), loss=0.0, grad_norm=0.0, gradients=0.0, updates=1e-3)
    assert moved.badness(bounds_for("fp32", options)) == pytest.approx(100)
    assert moved.badness(bounds_for("fp32", OptimizerSection(eps=1e-8))) == 0
    assert moved.badness(bounds_for("bf16", options)) == 0
    assert moved.badness(bounds_for("fp32", OptimizerSection(eps=1e-6, states="bf16"))) == pytest.approx(10)
