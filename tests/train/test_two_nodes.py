"""`tk train` under torchrun on two nodes: restarts, signals, and one record of all attempts."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.checkpoint.run.run_folder import RunFolder
from tk.core.config import parse
from tk.tests.train.conftest import Configure
from tk.tests.train.train_processes import DEADLINE, children_of, losses_of, wait_for_step, wait_until
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

WriteToml = Callable[..., Path]
pytestmark = [pytest.mark.slow, pytest.mark.matrix]


def _torchrun(port: int, node: int, log: Path, *arguments: str) -> subprocess.Popen[str]:
    """An agent with one rank, as one of two nodes."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
    hosts = ["--rdzv-conf", f"is_host={1 - node}", "--local-addr", "localhost"]
    elastic = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--monitor-interval", "0.1"]
    with log.open("a") as output:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *elastic,
                *rendezvous,
                *hosts,
                "-m",
                "tk",
                "train",
                *arguments,
            ],
            stdout=output,
            stderr=output,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )


def test_two_nodes_under_torchrun_restart_after_a_kill_save_on_sigterm_and_go_on_as_one(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = write_toml(configure(train={"steps": 100_000}, checkpoint={"every": 10}))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    log = tmp_path / "agents.log"
    agents = [_torchrun(port, node, log, str(config)) for node in range(2)]
    try:
        wait_until(lambda: len(RunFolder(run).steps()) > 0, agents[0])
        os.kill(int(children_of(agents[1])[0]), signal.SIGKILL)
        wait_until(lambda: "resuming from" in log.read_text(), agents[0])
        resumed = int(re.search(r"resuming from \S+step-0*(\d+)", log.read_text())[1])  # type: ignore[index]
        wait_for_step(run, resumed + 6, agents[0])
        os.kill(int(children_of(agents[1])[0]), signal.SIGTERM)  # every rank exits 0, and with them both agents
        assert [agent.wait(timeout=DEADLINE) for agent in agents] == [0, 0]
    finally:
        for process_id in [child for agent in agents for child in children_of(agent)]:
            os.kill(int(process_id), signal.SIGKILL)  # ranks outlive a torchrun that is killed
        for agent in agents:
            agent.kill()
    assert 10 <= resumed < Checkpoint.open(run).step
    steps = [step for step, _, _ in losses_of(run)]
    assert steps == list(range(1, steps[-1] + 1)), "no step is missing or made twice"
    Trainer(parse(configure(train={"steps": steps[-1] + 1}), TrainConfig, "test")).fit()
    assert Checkpoint.open(run).step == steps[-1] + 1
