"""The end of `tk train`: the run's result in a line or as JSON, and the commands that come next."""

import re
from typing import TYPE_CHECKING, Any

import click

from ..core.progress import format_seconds
from .invocation import commands_for, suggest

if TYPE_CHECKING:
    from ..train.config.train_config import TrainConfig
    from ..train.records.outcome import RunOutcome


def show_result(config: "TrainConfig", seconds: float, as_json: bool, again: str) -> None:
    """Prints the result of a run that has ended without an error; nothing if it saved no step.

    Args:
        config: the run's configuration.
        seconds: the time of the command.
        as_json: whether the result is the last line of JSON; then no commands come next.
        again: the command that continues the run; "" if it is not known.
    """
    from ..train.records.outcome import read_outcome
    from ..train.records.run_events import event_line

    outcome = read_outcome(config.run_folder)
    if outcome.checkpoint is None:
        return
    if as_json:
        click.echo(event_line("result", _document(config, outcome, seconds)))
        return
    step, num_steps = outcome.checkpoint.step, config.train.steps
    losses = [_loss("loss", outcome.last_step.get("loss"))]
    if outcome.last_evaluation.get("step") == step:
        losses.append(_loss("held-out loss", outcome.last_evaluation.get("eval_loss")))
    words = "".join(f", {each}" for each in losses if each)
    click.echo(f"{outcome.checkpoint.path}: step {step} of {num_steps}{words}, in {format_seconds(seconds)}")
    suggest(*_next_commands(config, outcome, again))


def _document(config: "TrainConfig", outcome: "RunOutcome", seconds: float) -> dict[str, Any]:
    checkpoint = outcome.checkpoint
    return {
        "run": str(config.run_folder),
        "checkpoint": str(checkpoint.path) if checkpoint else None,
        "step": checkpoint.step if checkpoint else None,
        "steps": config.train.steps,
        "loss": outcome.last_step.get("loss"),
        "eval_loss": outcome.last_evaluation.get("eval_loss"),
        "eval_perplexity": outcome.last_evaluation.get("eval_perplexity"),
        "tokens": outcome.last_step.get("tokens"),
        "seconds": seconds,
    }


def _loss(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.3f}"


def _next_commands(config: "TrainConfig", outcome: "RunOutcome", again: str) -> list[str]:
    checkpoint, num_steps = outcome.checkpoint, config.train.steps
    if checkpoint is None:
        return []
    if again and checkpoint.step < num_steps:
        return [f"{again}  # goes on from step {checkpoint.step}"]
    longer = re.sub(r" --set train\.steps=\d+", "", again) + f" --set train.steps={2 * num_steps}"
    more = [f"{longer}  # trains on"] if again else []
    return [*commands_for(config.run_folder, checkpoint.path), *more]
