"""Rows that a thread reads ahead: as fast as the slower of reading and computing, and the same rows as without it."""

import threading
from collections import defaultdict

import pytest

from tk.core.errors import StorageError
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.run.read_ahead import AHEAD, ReadAhead
from tk.train.state.progress import StepResult


class Rows:
    """A source of which two rows make a batch.

    Attributes:
        read: the samples whose reading has begun.
        begun: an event for each of them.
    """

    def __init__(self) -> None:
        self.read: list[int] = []
        self.begun = defaultdict[int, threading.Event](threading.Event)

    def __call__(self, first: int) -> list[int]:
        self.read.append(first)
        self.begun[first].set()
        return [first, first + 1]


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("tk-rows")]


def test_the_next_batch_is_read_while_a_step_computes() -> None:
    rows = Rows()
    batches = ReadAhead(rows, stride=2)
    with batches.running(6):
        for first in range(0, 10, 2):
            assert batches.take(first) == [first, first + 1]
            assert rows.begun[first + 2].wait(60)  # the step computes


def test_batches_come_in_order_and_only_as_many_as_are_needed() -> None:
    rows = Rows()
    batches = ReadAhead(rows, stride=2)
    with batches.running(5):
        assert [batches.take(first)[0] for first in range(10, 20, 2)] == [10, 12, 14, 16, 18]
    assert rows.read == [10, 12, 14, 16, 18]
    assert batches.take(4) == [4, 5], "outside of the block the batch is read in place"
    assert not threads()


def test_no_more_batches_are_ahead_than_the_bound() -> None:
    rows = Rows()
    batches = ReadAhead(rows, stride=2)
    with batches.running(100):
        batches.take(0)
    assert len(rows.read) <= 1 + AHEAD


def test_a_run_that_goes_on_elsewhere_gets_the_rows_from_there() -> None:
    batches = ReadAhead(Rows(), stride=2)
    with batches.running(9):
        assert [batches.take(first) for first in (0, 2, 40, 42, 6)] == [[n, n + 1] for n in (0, 2, 40, 42, 6)]


def test_an_error_arrives_at_the_step_that_needs_the_row() -> None:
    def read(first: int) -> int:
        if first == 4:
            raise StorageError("the disk is gone")
        return first

    batches = ReadAhead(read, stride=2)
    with batches.running(9):
        assert [batches.take(0), batches.take(2)] == [0, 2]
        with pytest.raises(StorageError, match="the disk is gone"):
            batches.take(4)
    assert not threads()


def test_the_thread_ends_with_a_run_that_is_interrupted() -> None:
    batches = ReadAhead(Rows(), stride=2)

    def interrupted() -> None:
        with batches.running(100):
            batches.take(0)
            assert threads()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not threads()


def losses(config: dict[str, object], stop_after: int) -> list[float]:
    """Trains as `tk train` does until a step was asked to be the last; returns the losses."""
    found: list[float] = []

    def on_step(step: int, result: StepResult) -> None:
        found.append(result.loss)
        trainer.stop.requested = step >= stop_after - 1

    trainer = make_trainer(config, on_step=on_step)
    trainer.fit()
    assert not threads()
    return found


def test_losses_are_the_same_bits_with_and_without_the_thread_and_after_a_resume(configure: Configure) -> None:
    plain = make_trainer(configure("plain", train={"steps": 6}))
    expected = [plain.step().loss for _ in range(6)]  # a step outside of `fit` reads in place
    config = configure(train={"steps": 6})
    found = losses(config, 3)
    assert len(found) == 3
    assert found + losses(config, 6) == expected
