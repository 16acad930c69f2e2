"""The events of a run: each is a record of the log and, on demand, a line of JSON on standard output (no torch).

Rank 0 reports them: the start from a checkpoint, logged steps, evaluations, and saved steps.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ...checkpoint.save.saved_step import SavedStep
from ...core.progress import format_bytes, format_seconds

_LOG: Final = logging.getLogger(__name__)


def report_start(path: str, step: int, changes: Mapping[str, Sequence[Any]], num_steps: int) -> None:
    """Reports that the run goes on from a checkpoint.

    Args:
        path, step: the checkpoint and its step.
        changes: the old and the new value of each key of the configuration that differs; see `run_settings`.
        num_steps: `train.steps`.
    """
    done = f"; train.steps = {num_steps} leaves nothing to do" if step >= num_steps else ""
    lines = [f"changed {key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in changes.items()]
    fields = {"path": path, "step": step, "changes": {key: list(values) for key, values in changes.items()}}
    _report(logging.INFO, "resumed", "\n".join([f"resuming from {path}{done}", *lines]), fields)


def report_step(values: Mapping[str, float | None]) -> None:
    """Reports a logged step, as a detail of the log; `values` are those of its line in metrics.jsonl."""
    words = ", ".join(f"{name} {_number(value)}" for name, value in values.items())
    _report(logging.DEBUG, "step", words, values)


def report_evaluation(values: Mapping[str, float | None]) -> None:
    """Reports an evaluation; `values` are those of its line in metrics.jsonl."""
    loss, perplexity = (_number(values[name]) for name in ("eval_loss", "eval_perplexity"))
    words = f"held-out loss after step {values['step']}: {loss} nats per token (perplexity {perplexity})"
    _report(logging.INFO, "evaluation", words, values)


def report_save(saved: SavedStep) -> None:
    """Reports a committed step."""
    words = f"saved {saved.path}: {format_bytes(saved.num_bytes)} in {format_seconds(saved.seconds)}"
    fields = {"path": saved.path, "step": saved.step, "bytes": saved.num_bytes, "seconds": saved.seconds}
    _report(logging.INFO, "saved", words, fields)


@contextmanager
def events_on_stdout() -> Iterator[None]:
    """A context in which each event of this process is also a line of JSON on standard output."""
    lines = logging.StreamHandler(sys.stdout)
    lines.setFormatter(_EventForm())
    _LOG.addHandler(lines)
    _LOG.setLevel(logging.DEBUG)  # the handler of the log has a level of its own
    try:
        yield
    finally:
        _LOG.removeHandler(lines)
        _LOG.setLevel(logging.NOTSET)


def event_line(event: str, fields: Mapping[str, Any]) -> str:
    """Returns the line of JSON of an event."""
    return json.dumps({"event": event, **fields}, allow_nan=False)


class _EventForm(logging.Formatter):
    """Writes a record as the line of its event."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record)["fields"].items() if name != "message"}
        return event_line(fields.pop("event"), fields)


def _report(level: int, event: str, words: str, fields: Mapping[str, Any]) -> None:
    _LOG.log(level, "%s", words, extra={"fields": {"message": words, "event": event, **fields}})


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _shown(value: Any) -> str:
    return json.dumps(value)
