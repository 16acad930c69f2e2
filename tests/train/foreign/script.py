"""One habit of users of torch: a script for both loops of between_calls.py, and its row of docs/foreign-modules.md."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tk.tests.train.foreign.between_calls import Loop, loss_of

SPREAD = "spread over the ranks"
ALL = (0, 1, 2, 3)


@dataclass(frozen=True)
class Script:
    """One habit.

    Attributes:
        run: the script; the test makes another step after it.
        outcome: the cell of the table: what happens.
        refused: matches the error that the script ends with, at the stages in `stages`.
        accumulate: micro-batches per step.
    """

    run: Callable[[Loop, Path], object]
    outcome: str = "as torch"
    refused: str = ""
    stages: tuple[int, ...] = ALL
    accumulate: int = 1


def turn(loop: Loop, number: int) -> None:
    """Makes one pass forward and backward, and the step if it is due."""
    loop.backward(loss_of(loop.forward(number)))
    loop.step()


def parameters(loop: Loop) -> Iterator[nn.Parameter]:
    yield from loop.module.parameters()


def spread(run: Callable[[Loop, Path], object], accumulate: int = 1) -> Script:
    """Returns a script that stage 3 refuses outside of `full_parameters()`."""
    outcome = "as torch; at stage 3 refused outside of `full_parameters()`"
    return Script(run, outcome, SPREAD, (3,), accumulate)


def refused(run: Callable[[Loop, Path], object], error: str, outcome: str, accumulate: int = 1) -> Script:
    """Returns a script that is refused at every stage with an error that matches `error`."""
    return Script(run, f"refused: {outcome}", error, ALL, accumulate)
