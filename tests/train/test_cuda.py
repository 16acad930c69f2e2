"""`tk train` on a GPU: the same run as on the CPU, from the first loss to the checkpoint."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer

pytestmark = pytest.mark.gpu


def train(config: Path, visible_devices: str | None) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths}
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    command = [sys.executable, "-m", "tk", "train", str(config), "--nproc", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr


def logged(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "grad_norm" in line]


@pytest.mark.parametrize("stage", [0, 1])
def test_cuda_and_cpu_train_alike_in_fp32(
    configure: Configure, write_toml: Callable[..., Path], tmp_path: Path, stage: int
) -> None:
    runs = {name: write_toml(configure(name, zero={"stage": stage}), f"{name}.toml") for name in ("cuda", "cpu")}
    train(runs["cuda"], None)
    train(runs["cpu"], "")
    cuda, cpu = logged(tmp_path / "cuda"), logged(tmp_path / "cpu")
    assert len(cuda) == len(cpu) == 20
    assert [line["loss"] for line in cuda] == pytest.approx([line["loss"] for line in cpu], rel=1e-4)
    assert [line["grad_norm"] for line in cuda] == pytest.approx([line["grad_norm"] for line in cpu], rel=1e-3)
    # The memory that torch holds for a tiny model on the GPU, not the hundreds of megabytes of a process.
    assert max(line["memory_bytes"] for line in cuda) < 100 << 20 < min(line["memory_bytes"] for line in cpu)
    assert Checkpoint.open(tmp_path / "cuda").step == 20


def test_activations_on_the_host_leave_memory_of_the_gpu(configure: Configure) -> None:
    """The last step of two runs of a model with more activations than parameters."""
    losses, peaks = [], []
    for place in ("none", "cpu"):
        config = configure(
            model={"num_hidden_layers": 12, "hidden_size": 128},
            train={"micro_batch_size": 64, "global_batch_size": 128, "deterministic": True},
            offload={"activations": place},
        )
        trainer = make_trainer(config, device=torch.device("cuda"))
        trainer.step()
        torch.cuda.reset_peak_memory_stats()
        losses.append(trainer.step().loss)
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[0] == losses[1]
    assert peaks[1] < peaks[0] / 2
