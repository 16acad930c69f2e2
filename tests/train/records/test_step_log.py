"""The step log: the lines that steps leave, rates over an interval, and time that is no training time."""

import json
import math
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tk.core.config import parse
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.parallel.mesh import ALONE, Group, join_world
from tk.tests.clock import Clock
from tk.tests.rank_pool import RankPool
from tk.train.config.train_config import TrainConfig
from tk.train.planning.flops import flops_per_token
from tk.train.records import step_log
from tk.train.records.metrics import MetricsFile
from tk.train.records.step_log import StepLog
from tk.train.state.progress import StepResult, TrainState

MODEL = ModelConfig(
    vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=8,
)  # fmt: skip
TOKENS = 4 * 8  # of a step: rows x seq_len
PEAK = 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(step_log, "peak_flops", lambda device, dtype, minute: PEAK)
    return clock


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[MetricsFile]:
    file = MetricsFile(tmp_path, 0, "attempt")
    yield file
    file.close()


def make_log(metrics: MetricsFile | None, folder: Path, world: Group = ALONE, **sections: dict[str, Any]) -> StepLog:
    """Returns the log of a run of 10 steps that writes a line for every fourth."""
    train = {"steps": 10, "log_every": 4, "seq_len": 8, "global_batch_size": 4}
    data = {"train": train, "model": {"max_position_embeddings": 8}, "checkpoint": {"dir": str(folder)}} | sections
    config = parse(data, TrainConfig, "test")
    return StepLog(config, decoder_spec(MODEL), world, torch.device("cpu"), torch.float32, metrics, 0)


def record(log: StepLog, step: int, last: bool = False, **changes: Any) -> None:
    result = {"loss": 2.0, "grad_norm": 1.5, "lr": 0.01, "num_tokens": 20, "stop": False} | changes
    log.record(TrainState(step, 20 * step, 4 * step), StepResult(**result), last)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_first_every_fourth_and_the_last_step_have_a_line(
    clock: Clock, metrics: MetricsFile, tmp_path: Path
) -> None:
    with make_log(metrics, tmp_path) as log:
        for step in range(1, 11):
            clock.now += 0.5
            record(log, step, last=step == 10)
    assert [line["step"] for line in lines(tmp_path)] == [1, 4, 8, 10]
    assert [line["tokens"] for line in lines(tmp_path)] == [20, 80, 160, 200]


def test_rates_are_those_of_the_interval(clock: Clock, metrics: MetricsFile, tmp_path: Path) -> None:
    log = make_log(metrics, tmp_path)
    clock.now += 7.0
    log.restart_clock()  # a save took 7 seconds
    for step in (2, 3, 4):
        clock.now += 0.5
        record(log, step, updated=step != 3)
    (line,) = lines(tmp_path)
    assert line["step_seconds"] == 0.5
    assert line["tokens_per_second"] == TOKENS / 0.5
    assert line["learned_tokens_per_second"] == 20 / 0.5
    assert line["mfu"] == pytest.approx(flops_per_token(decoder_spec(MODEL), 8) * TOKENS / 0.5 / PEAK)
    assert line["skipped_steps"] == 1
    clock.now += 0.25
    record(log, 5, last=True)
    assert lines(tmp_path)[1]["step_seconds"] == 0.25, "the interval begins anew after a line"
    assert lines(tmp_path)[1]["skipped_steps"] == 0


def test_mfu_is_of_the_peak_of_the_same_minute_and_never_above_1(
    clock: Clock, metrics: MetricsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was busy when the run began, and is free afterwards: 1.18 of its peak were reported."""
    needed = flops_per_token(decoder_spec(MODEL), 8) * TOKENS / 0.5
    peaks = {0: needed / 1.18, 1: needed * 2}
    monkeypatch.setattr(step_log, "peak_flops", lambda device, dtype, minute: peaks[minute])
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * (clock.now >= 101))
    log = make_log(metrics, tmp_path)
    for step in (4, 8):
        clock.now += 0.5
        record(log, step)
    assert [line["mfu"] for line in lines(tmp_path)] == [1.0, pytest.approx(0.5)]


def test_the_measurement_of_the_peak_is_no_training_time(
    clock: Clock, metrics: MetricsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(device: torch.device, dtype: torch.dtype, minute: int) -> float:
        clock.now += 7.0
        return PEAK

    monkeypatch.setattr(step_log, "peak_flops", measure)
    monkeypatch.setattr(time, "monotonic", lambda: 600.0 * clock.now)  # each logged step is in a minute of its own
    log = make_log(metrics, tmp_path)
    begin = clock.now
    for step in range(1, 9):
        clock.now += 0.5
        record(log, step)
    assert [line["step_seconds"] for line in lines(tmp_path)] == [0.5] * 3
    assert clock.now == begin + 8 * 0.5 + 3 * 7.0


def measuring_steps(folder: str, clocks: list[list[float]]) -> tuple[list[int], float]:
    """Returns the moments at which this rank measured, and the peak in the end; `clocks` has each rank's readings."""
    rank, moment = dist.get_rank(), 0
    measured: list[int] = []

    @lru_cache
    def measure(device: torch.device, dtype: torch.dtype, minute: int) -> float:
        measured.append(moment)
        return PEAK * (rank + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_log, "peak_flops", measure)
        patch.setattr(time, "monotonic", lambda: clocks[rank][moment])
        log = make_log(None, Path(folder), join_world())
        for moment in range(1, len(clocks[rank])):
            record(log, 4 * moment)
    return measured, log.peak


@pytest.mark.parametrize(
    ("ahead", "expected"), [(8000.0, [0, 4]), (0.02, [0, 2, 4])], ids=["two hosts", "one passes the minute first"]
)
def test_all_ranks_measure_the_peak_at_the_same_steps_whatever_their_clocks_say(
    rank_pool: RankPool, tmp_path: Path, ahead: float, expected: list[int]
) -> None:
    clock = [59.0, 59.9, 60.1, 80.0, 119.99, 130.0]
    clocks = [clock, [moment + ahead for moment in clock]]
    for found in rank_pool.run(measuring_steps, 2, folder=str(tmp_path), clocks=clocks):
        assert found == [expected, 3 * PEAK]


def test_numbers_that_json_lacks_are_null_and_rare_values_are_written_if_they_exist(
    clock: Clock, metrics: MetricsFile, tmp_path: Path
) -> None:
    clock.now += 1.0
    log = make_log(metrics, tmp_path)
    clock.now += 1.0
    record(log, 1, loss=math.inf, grad_norm=math.nan)
    fp16 = make_log(metrics, tmp_path, precision={"params": "fp16"})
    clock.now += 1.0
    record(fp16, 4, loss_scale=1024.0, balance_loss=2.5, z_loss=4.5)
    plain, rare = lines(tmp_path)
    assert (plain["loss"], plain["grad_norm"]) == (None, None)
    assert plain.keys() & {"loss_scale", "balance_loss", "z_loss"} == set()
    assert (rare["loss_scale"], rare["balance_loss"], rare["z_loss"]) == (1024.0, 2.5, 4.5)


def test_an_evaluation_that_is_not_finite_is_null(clock: Clock, metrics: MetricsFile, tmp_path: Path) -> None:
    make_log(metrics, tmp_path).record_evaluation(3, math.nan)
    assert lines(tmp_path) == [{"step": 3, "eval_loss": None, "eval_perplexity": None}]


def test_an_evaluation_has_its_own_line_and_is_no_training_time(
    clock: Clock, metrics: MetricsFile, tmp_path: Path
) -> None:
    log = make_log(metrics, tmp_path)
    clock.now += 9.0
    log.record_evaluation(0, math.log(8.0))
    log.record_evaluation(0, 5000.0)
    clock.now += 0.5
    record(log, 1)
    first, large, step = lines(tmp_path)
    assert first == {"step": 0, "eval_loss": math.log(8.0), "eval_perplexity": pytest.approx(8.0)}
    assert large["eval_perplexity"] == math.exp(700), "and no overflow"
    assert step["step_seconds"] == 0.5


def test_ranks_without_a_file_count_and_write_nothing(clock: Clock, tmp_path: Path) -> None:
    with make_log(None, tmp_path) as log:
        clock.now += 1.0
        record(log, 1)
        log.record_evaluation(1, 2.0)
        assert log.bar is None
    assert list(tmp_path.iterdir()) == []
