"""A worker's start: environments that are not those of a job, and errors that the launcher reads."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.core.config import parse
from tk.core.errors import ConfigError, WorkerDied
from tk.train.config.train_config import TrainConfig
from tk.train.health.stop import StopRequest
from tk.train.launch import worker
from tk.train.launch.launcher import FORK, RENDEZVOUS_VARIABLE
from tk.train.launch.rank_report import ERROR_FOLDER_VARIABLE, read_reports
from tk.train.launch.worker import main, run_rank

LOST = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", RENDEZVOUS_VARIABLE)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The configuration of a rank that takes no signals, in an environment without a job."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(StopRequest, "install", lambda stop: None)
    return parse({"checkpoint": {"dir": str(tmp_path / "run")}}, TrainConfig, "test")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "The environment variable RANK is '', but must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "The environment variable WORLD_SIZE is 'two'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, but MASTER_ADDR is not"),
    ],
)
def test_an_incomplete_environment_is_refused(
    environment: dict[str, str], said: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        run_rank(config, "auto")


@pytest.fixture
def call_main(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[..., int], list[str]], int]:
    """A function that calls `main` as rank 1 of a launcher's job, with another function in place of `run_rank`."""

    def call(run: Callable[..., int], more: list[str]) -> int:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        monkeypatch.setenv(ERROR_FOLDER_VARIABLE, str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["worker", config.model_dump_json(), "never", "text", *more])
        monkeypatch.setattr(worker, "run_rank", run)
        return main()

    return call


@pytest.mark.parametrize("more", [[], [FORK]])
def test_a_rank_gets_the_configuration_of_its_launcher(
    more: list[str], config: TrainConfig, call_main: Any, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> int:
        calls.append(arguments)
        return 0

    assert call_main(run, more) == 0
    assert calls == [(config, "never", bool(more))]
    assert read_reports(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "kind", "code", "said"),
    [
        (ConfigError("data.sources is empty"), "known", 2, "data.sources is empty"),
        (WorkerDied("the writer was killed"), "known", 1, "the writer was killed"),
        (ValueError("a bug"), "unexpected", 1, "Rank 1: ValueError: a bug"),
        (
            RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"),
            "peers lost",
            1,
            "Connection closed by peer",
        ),
    ],
)
def test_an_error_becomes_a_report_and_an_exit_code(
    error: Exception, kind: str, code: int, said: str, call_main: Any, tmp_path: Path
) -> None:
    def run(*arguments: Any) -> int:
        raise error

    assert call_main(run, []) == code
    (report,) = read_reports(tmp_path)
    assert report.kind == kind
    assert said in str(report.error)
