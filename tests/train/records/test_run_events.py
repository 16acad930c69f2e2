"""The events of a run: what the log shows of them, and their lines of JSON."""

import json

import pytest

from tk.checkpoint.save.saved_step import SavedStep
from tk.core.console_log import show_log
from tk.train.records.run_events import (
    events_on_stdout,
    report_evaluation,
    report_save,
    report_start,
    report_step,
)

SAVED = SavedStep(4, "run/step-00000004", 3 << 19, 0.25)


def report_all() -> None:
    report_start("run/step-00000002", 2, {"train.steps": (2, 4), "optimizer.schedule": ("cosine", "wsd")}, 4)
    report_step({"step": 4, "loss": 2.5, "grad_norm": None})
    report_save(SAVED)
    report_evaluation({"step": 4, "eval_loss": 2.75, "eval_perplexity": 15.642631884188171})


def test_the_log_says_all_but_single_steps(capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    report_all()
    assert capsys.readouterr().err.splitlines() == [
        "resuming from run/step-00000002",
        "changed train.steps: 2 -> 4",
        'changed optimizer.schedule: "cosine" -> "wsd"',
        "saved run/step-00000004: 1.5 MiB in 250 ms",
        "held-out loss after step 4: 2.75 nats per token (perplexity 15.643)",
    ]
    show_log("verbose text")
    report_all()
    assert "run_events: step 4, loss 2.5, grad_norm not finite\n" in capsys.readouterr().err
    show_log()


@pytest.mark.parametrize("form", ["text", "quiet text", "json"])
def test_every_event_is_a_line_of_json_on_demand(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_log(form, {"rank": 0})
    with events_on_stdout():
        report_all()
    report_all()
    said = capsys.readouterr()
    show_log()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert lines == [
        {
            "event": "resumed",
            "path": "run/step-00000002",
            "step": 2,
            "changes": {"train.steps": [2, 4], "optimizer.schedule": ["cosine", "wsd"]},
        },
        {"event": "step", "step": 4, "loss": 2.5, "grad_norm": None},
        {"event": "saved", "path": "run/step-00000004", "step": 4, "bytes": 3 << 19, "seconds": 0.25},
        {"event": "evaluation", "step": 4, "eval_loss": 2.75, "eval_perplexity": 15.642631884188171},
    ]
    if form == "json":
        logged = [json.loads(line) for line in said.err.splitlines()]
        assert [line["event"] for line in logged] == 2 * ["resumed", "saved", "evaluation"], "no single steps"
        assert all(line["rank"] == 0 and line["message"] for line in logged)
    else:
        assert ("nats per token" in said.err) == (form == "text")
