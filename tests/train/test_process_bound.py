"""Engines of training in other processes: forks and copies are refused by name, also while a save is under way."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError
from tk.parallel.collectives import all_reduce
from tk.parallel.mesh import join_world
from tk.tests.other_processes import check_outcomes
from tk.tests.rank_pool import RankPool
from tk.train import initialize

pytestmark = pytest.mark.slow


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["step", "save", "Trainer"])
def test_training_goes_on_in_the_process_that_began_it(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tk.tests.train.process_bound", name, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    check_outcomes(json.loads(run.stdout), "process group" if name == "Trainer" else "training engine")


def test_a_fork_makes_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = initialize(nn.Linear(4, 4))
    loss = engine(torch.ones(2, 4)).sum()
    home = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: home + 1)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: engine(torch.ones(2, 4)),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "state_dict": engine.state_dict,
        "save": lambda: engine.save(tmp_path / "run"),
        "load": lambda: engine.load(tmp_path / "run"),
        "full_parameters": lambda: engine.full_parameters().__enter__(),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"is used in process {home + 1}"):
            call()
        assert not (tmp_path / "run").exists(), name
    engine.close()
    monkeypatch.undo()
    engine.backward(loss)
    assert engine.step()


def fork_and_reduce() -> str:
    """Sums over all ranks in a fork of each rank, then in the rank itself."""
    world = join_world()
    ours, theirs = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            all_reduce(torch.ones(1), world)
            os.write(theirs, b"summed")
        except ConfigError as error:
            os.write(theirs, str(error).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as stream:
        found = stream.read().decode()
    os.waitpid(process_id, 0)
    return f"{float(all_reduce(torch.ones(1), world))}: {found}"


def test_a_fork_sends_no_message_to_other_ranks(rank_pool: RankPool) -> None:
    for found in rank_pool.run(fork_and_reduce, 2):
        assert found.startswith("2.0: This process group was made in process ")
