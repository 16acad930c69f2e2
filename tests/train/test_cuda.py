"""`tk train` on a GPU: the same run as on the CPU, from the first loss to the checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.infer import LLM, SamplingParams
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer

pytestmark = pytest.mark.gpu


def train(config: Path, visible_devices: str | None, *options: str) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths}
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    command = [sys.executable, "-m", "tk", "train", str(config), "--nproc", "1", *options]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr


def logged(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "grad_norm" in line]


MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
SMALL = {**MIXTURE, "moe_intermediate_size": 16}
HALF_ROTARY = {"partial_rotary_factor": 0.5, "use_qk_norm": True, "n_group": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Rows of everything that reaches a device by a way of its own. Each is trained on both devices, from the same seed.
SECTIONS: dict[str, dict[str, Any]] = {
    "documents in a window": {
        "model": {"architecture": "mistral", "sliding_window": 5},
        "data": {"packing": "documents"},
    },
    "yarn, tied, in row blocks": {
        "model": {"rope_scaling": YARN, "tie_word_embeddings": True},
        "recompute": {"mlp_block": 3},
    },
    "mixtral": {"model": {**MIXTURE, "architecture": "mixtral"}, "train": {"router_z_loss_coef": 0.02}},
    "qwen2_moe, recomputed": {
        "model": {**SMALL, "architecture": "qwen2_moe", "shared_expert_intermediate_size": 48},
        "recompute": {"mode": "full"},
    },
    "glm4_moe with biases": {
        "model": {**SMALL, **HALF_ROTARY, "architecture": "glm4_moe"},
        "train": {"router_bias_update_rate": 0.01},
        "recompute": {"mode": "selective"},
    },
    "stage 3, states on disk": {"zero": {"stage": 3}, "offload": {"optimizer": "disk", "parameters": "cpu"}},
    "compiled": {"train": {"compile": True}},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch.compile, in torch 2.11
@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS.keys())
def test_models_train_alike_on_both_devices(configure: Configure, sections: dict[str, Any]) -> None:
    losses, norms = {}, {}
    for device in ("cuda", "cpu"):
        merged = {name: dict(section) for name, section in sections.items()}
        merged["train"] = {"steps": 6} | merged.get("train", {})
        trainer = make_trainer(configure(device, **merged), device=torch.device(device))
        results = [trainer.step() for _ in range(6)]
        losses[device] = [result.loss for result in results]
        norms[device] = [result.grad_norm for result in results]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)
    assert norms["cuda"] == pytest.approx(norms["cpu"], rel=1e-3)


@pytest.mark.parametrize("params", ["bf16", "fp16"])
def test_16_bits_learn_as_fp32_does(configure: Configure, params: str) -> None:
    losses = {}
    for dtype in (params, "fp32"):
        config = configure(dtype, precision={"params": dtype}, train={"steps": 12})
        trainer = make_trainer(config, device=torch.device("cuda"))
        losses[dtype] = [result.loss for result in (trainer.step() for _ in range(12)) if result.updated]
    assert losses[params][-6:] == pytest.approx(losses["fp32"][-6:], rel=2e-2)


def test_a_gpus_checkpoint_goes_on_on_the_cpu_and_is_served(
    configure: Configure, write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    """Ten steps on the GPU, then ten on the CPU, are twenty on the CPU; both devices serve the last step."""
    whole = write_toml(configure("whole"), "whole.toml")
    train(whole, "")
    half = configure("half")
    train(write_toml(half, "half.toml"), None, "--set", "checkpoint.every=10", "--set", "checkpoint.keep=5")
    shutil.rmtree(Checkpoint.open(tmp_path / "half").path)  # the GPU's last step: the CPU makes it again
    train(write_toml(half, "half.toml"), "")
    expected, found = logged(tmp_path / "whole"), logged(tmp_path / "half")
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-4)
    greedy = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    answers = []
    for kernels in ("aten", "native"):
        with LLM(tmp_path / "half", kernels=kernels, kv_blocks=30) as llm:
            answers.append([completion.token_ids for completion in llm.generate([[5, 6, 7], [9]], greedy)])
    assert answers[0] == answers[1]


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
    """The last step of two runs of a model with more activations than parameters and cuBLAS's workspace (32 MiB)."""
    losses, peaks = [], []
    for place in ("none", "cpu"):
        config = configure(
            model={"num_hidden_layers": 24, "hidden_size": 128},
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
