"""The training loop: the rows of each step, its learning rate, and when it saves, evaluates and stops."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.checkpoint.run.run_folder import RunFolder
from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.engine.lr_schedule import learning_rate
from tk.train.engine.row_packer import PackedRows
from tk.train.health.heartbeat import Heartbeat
from tk.train.health.stop import StopRequest
from tk.train.run.trainer import Trainer
from tk.train.state.progress import StepResult, TrainState


class Phases(Heartbeat):
    """A heartbeat that keeps its phases, those of one name in a row once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str]] = []

    def beat(self, phase: str, step: int | None = None) -> None:
        super().beat(phase, step)
        self.seen.append((self._now.step, phase))

    def of(self, *names: str) -> list[tuple[int, str]]:
        """Returns (step, phase) of these phases, in order."""
        return [(step, phase) for step, phase in self.seen if phase in names]


@pytest.fixture
def make(configure: Configure) -> Callable[..., Trainer]:
    """Makes the trainer of one process; arguments are sections of its configuration, and `options` its arguments."""

    def trainer(options: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Trainer:
        return Trainer(parse(configure(**sections), TrainConfig, "test"), **(options or {}))

    return trainer


def asked() -> StopRequest:
    """Returns a request to stop that has been made."""
    stop = StopRequest()
    stop.requested = True
    return stop


def steps_of(config: TrainConfig) -> list[int]:
    return [step for step, _ in RunFolder(config.run_folder).steps()]


def evaluations_of(config: TrainConfig) -> list[int]:
    lines = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "eval_loss" in line]


def parameters(trainer: Trainer) -> torch.Tensor:
    """Returns a copy of all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for stage in trainer.stages for parameter in stage.parameters()])


def test_a_step_takes_the_next_rows_and_counts_them(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(train={"global_batch_size": 5})
    taken: list[PackedRows] = []
    train = trainer.pipeline.train

    def record(micro_batches: Sequence[PackedRows], scale: float) -> torch.Tensor:
        taken.extend(micro_batches)
        return train(micro_batches, scale)

    monkeypatch.setattr(trainer.pipeline, "train", record)
    results = [trainer.step() for _ in range(2)]
    rows = np.concatenate([micro.on(trainer.device)["inputs"].numpy() for micro in taken])
    expected = [trainer.inputs.train.row(number).inputs for number in range(10)]
    assert [micro.shape[0] for micro in taken] == [2, 2, 2] * 2, "the last row of a step is padding"
    assert np.array_equal(rows[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10]], expected)
    assert [result.num_tokens for result in results] == [5 * 24] * 2
    assert trainer.state == TrainState(step=2, tokens=2 * 5 * 24, samples=10)


def test_the_learning_rate_is_that_of_the_step_and_is_used(make: Callable[..., Trainer]) -> None:
    trainer = make()
    before = parameters(trainer)
    rates = [trainer.step().lr for _ in range(3)]
    assert rates == [learning_rate(step, 20, trainer.config.optimizer) for step in range(3)]
    assert 0 < rates[0] < rates[1] < rates[2], "the rate warms up"
    moved = float((parameters(trainer) - before).abs().max())
    assert 0.5 * sum(rates) < moved < 2 * sum(rates), "AdamW moves a parameter by about the rate"


def test_initial_values_are_those_of_the_seed(make: Callable[..., Trainer]) -> None:
    drawn = [parameters(make(train={"seed": seed})) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_steps_are_saved_and_evaluated_when_due_and_at_the_end(make: Callable[..., Trainer]) -> None:
    phases, seen = Phases(), []
    trainer = make(
        {"heartbeat": phases, "on_step": lambda step, result: seen.append((step, result))},
        train={"steps": 5, "eval_every": 3},
        checkpoint={"every": 2},
    )
    assert trainer.fit() == TrainState(5, 5 * 6 * 24, 30)
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5]
    assert all(isinstance(result, StepResult) and result.updated and not result.stop for _, result in seen)
    assert steps_of(trainer.config) == [2, 4, 5]
    assert evaluations_of(trainer.config) == [3, 5]
    assert phases.seen[0] == (0, "loading")
    assert phases.of("data", "save", "evaluate") == [
        (1, "data"), (2, "data"), (2, "save"), (3, "data"), (3, "evaluate"),
        (4, "data"), (4, "save"), (5, "data"), (5, "save"), (5, "evaluate"),
    ]  # fmt: skip


def test_a_run_that_is_asked_to_stop_saves_and_does_not_evaluate(make: Callable[..., Trainer]) -> None:
    trainer = make({"stop": asked()}, train={"steps": 5, "eval_every": 1})
    assert trainer.fit().step == 1
    assert steps_of(trainer.config) == [1]
    assert evaluations_of(trainer.config) == []


def test_a_run_goes_on_from_the_stored_state(make: Callable[..., Trainer]) -> None:
    first = make({"stop": asked()}, train={"steps": 3})
    first.fit()
    stored = first.resume_state()
    assert (stored.state, stored.optimizer_step, stored.seed) == (first.state, 1, 0)
    assert stored.data_fingerprint == first.inputs.fingerprint
    losses: list[float] = []
    second = make({"on_step": lambda _, result: losses.append(result.loss)}, train={"steps": 3})
    assert second.fit() == TrainState(3, 3 * 6 * 24, 18)
    assert losses == [first.step().loss, first.step().loss]


def test_a_finished_run_makes_no_step(make: Callable[..., Trainer]) -> None:
    make(train={"steps": 1}).fit()

    def refuse(step: int, result: StepResult) -> None:
        raise AssertionError(f"step {step} was made again")

    assert make({"on_step": refuse}, train={"steps": 1}).fit().step == 1
    with pytest.raises(ConfigError, match="holds step 1 of an earlier run"):
        make({"resume": "never"}, train={"steps": 1}).fit()


def stop_on_rank_1(config: dict[str, Any]) -> tuple[int, int, float, list[bool]]:
    """Returns the layout's dp, the steps made, the tokens of a step and whether each step was the last, on a rank."""
    seen: list[StepResult] = []
    rank = torch.distributed.get_rank()
    trainer = Trainer(
        parse(config, TrainConfig, "test"),
        stop=asked() if rank == 1 else None,
        on_step=lambda step, result: seen.append(result),
    )
    state = trainer.fit()
    return trainer.mesh.layout.dp, state.step, seen[0].num_tokens, [result.stop for result in seen]


def test_a_request_on_one_rank_stops_all_after_the_same_step(
    rank_pool: RankPool, configure: Configure, tmp_path: Path
) -> None:
    found = rank_pool.run(stop_on_rank_1, 2, config=configure(train={"global_batch_size": 3, "micro_batch_size": 1}))
    assert found == [[2, 1, 3 * 24, [True]]] * 2
    assert [step for step, _ in RunFolder(tmp_path / "run").steps()] == [1]
