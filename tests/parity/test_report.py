"""The report of a comparison: verdict, rows, remarks and the page."""

from dataclasses import replace

from tk.parity.judge import BOUNDS, Result, worst_first
from tk.parity.layout import ParityLayout
from tk.parity.report import ParityReport

FP32 = BOUNDS["fp32"]


GOOD = Result(ParityLayout(tp=2), 1e-7, 1e-6, 4e-7, "model.norm.weight", 2e-7, seconds=1.5)


WRONG = Result(ParityLayout(dp=2), 1e-7, 3e-4, 4e-7, "model.norm.weight", 2e-7, seconds=0.5)


DEAD = Result(ParityLayout(pp=2), error="rank 1: its process ended with code -9", seconds=2.0)


def test_a_token_that_went_elsewhere_late_is_a_remark_and_no_failure() -> None:
    report = ParityReport([replace(GOOD, routing_changed=11), GOOD], FP32, 12, "fp32")
    assert not report.failed
    assert report.remarks() == [
        "1 layouts sent a token to another expert than one process did, first in step 11; each is compared up to there."
    ]


def test_the_worst_come_first_and_errors_before_them() -> None:
    assert worst_first([GOOD, DEAD, WRONG], FP32) == [DEAD, WRONG, GOOD]
    report = ParityReport([GOOD, DEAD, WRONG], FP32, 10, "fp32")
    assert report.failed == [DEAD, WRONG]
    assert report.verdict == "2 of 3 layouts differ from one process."
    assert report.rows(1) == report.rows(2), "those that failed are always shown"
    assert ("dp", "2", "1", "1", "1.0e-07", "3.0e-04", "4.0e-07", "2.0e-07") in report.axis_rows()
    assert f"- {DEAD.layout}: rank 1: its process" in report.page(["tk", "parity"])
    assert "The figures hold for commit" not in report.page(["tk", "parity"])
    assert ". The same command writes this page again.\n\nThe figures hold for commit abc123.\n\nA small model" in (
        report.page(["tk", "parity"], "abc123")
    )
    assert ParityReport([GOOD], FP32, 10, "fp32").failed == []
    assert ParityReport([replace(GOOD, gradients=None)], FP32, 10, "fp32").failed
    assert ParityReport([replace(GOOD, updates=None)], FP32, 10, "fp32").failed
    assert ParityReport([replace(GOOD, updates=2e-5)], FP32, 10, "fp32").failed
    assert "are compared after\n10 steps" in ParityReport([GOOD], FP32, 50, "fp32").page(["tk", "parity"])
    assert not ParityReport([replace(WRONG, gradients=None)], BOUNDS["bf16"], 10, "bf16").failed, "bf16 judges the loss"
