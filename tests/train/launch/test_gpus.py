"""Ranks against the GPUs of a machine: too few are named before a rank starts, or before torch takes one."""

import logging
import re
from typing import Any, Final

import pytest
import torch

from tk.core.config import parse
from tk.core.errors import ConfigError, ParallelError, TkError
from tk.train.config.sections import PrecisionSection
from tk.train.config.train_config import TrainConfig
from tk.train.launch import gpus, worker
from tk.train.launch.gpus import gpu_environment, precision_notes, require_dtype, require_gpus

TP_OVERLAPS: Final = {"parallel": {"tp": 2, "sequence_parallel": True}}


def config_of(sections: dict[str, Any]) -> TrainConfig:
    """Returns a run's configuration."""
    return parse({"checkpoint": {"dir": "run"}, **sections}, TrainConfig, "test")


@pytest.mark.parametrize(("num_gpus", "num_ranks", "fits"), [(8, 8, True), (8, 9, False), (0, 9, True), (1, 2, False)])
def test_ranks_that_are_started_need_a_gpu_each(
    num_gpus: int, num_ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: num_gpus)
    if fits:
        require_gpus(num_ranks)
        return
    with pytest.raises(ParallelError, match=rf"{num_ranks} ranks start on this machine, .* leave them {num_gpus} GPUs"):
        require_gpus(num_ranks)


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        ({}, "cuda:0"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "cuda:1"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_RANK is 0 and its LOCAL_WORLD_SIZE 3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
        ({"LOCAL_RANK": "two"}, "LOCAL_RANK is 'two', but must be a number"),
    ],
)
def test_a_rank_of_torchrun_takes_the_gpu_of_its_local_rank(
    environment: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with two GPUs. Every local rank gives up where there are more of them: none waits for the others."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if device.startswith("cuda"):
        assert worker._device(config_of({})) == torch.device(device)
        assert taken == [torch.device(device)]
        return
    with pytest.raises(TkError, match=device):
        worker._device(config_of({}))
    assert not taken


@pytest.mark.parametrize(
    ("changes", "given", "found"),
    [
        ({}, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {}),
        ({"parallel": {"tp": 2}}, {"PYTORCH_ALLOC_CONF": "x"}, {}),
        (TP_OVERLAPS, {"PYTORCH_ALLOC_CONF": "x"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (TP_OVERLAPS, {"PYTORCH_ALLOC_CONF": "x", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {}),
        (TP_OVERLAPS | {"zero": {"stage": 3}}, {"PYTORCH_ALLOC_CONF": "x"}, {}),
    ],
)
def test_ranks_on_gpus_get_variables_that_are_not_set_yet(
    changes: dict[str, Any], given: dict[str, str], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(changes)
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    assert gpu_environment(config, given) == found
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    assert gpu_environment(config, given) == {}


@pytest.mark.parametrize(
    ("section", "capability", "said"),
    [
        ({}, (9, 0), ["INFO fp32 products are computed in fp32", 'WARNING .* set precision.params = "bf16"']),
        ({}, (7, 5), ["INFO fp32 products are computed in fp32", 'WARNING .* set precision.params = "fp16"']),
        ({"params": "bf16"}, (9, 0), ["INFO fp32 products are computed in fp32"]),
        ({"params": "fp16", "tf32": True}, (8, 0), ["INFO fp32 products are computed in TF32"]),
        ({"params": "fp16", "tf32": True}, (7, 5), ["WARNING .* GPUs of capability 7.5 lack TF32"]),
    ],
)
def test_a_run_on_gpus_says_how_it_multiplies(
    section: dict[str, Any], capability: tuple[int, int], said: list[str]
) -> None:
    notes = [
        f"{logging.getLevelName(level)} {text}"
        for level, text in precision_notes(PrecisionSection(**section), capability)
    ]
    assert len(notes) == len(said)
    assert all(re.match(pattern, note) for pattern, note in zip(said, notes, strict=True)), notes


def test_bf16_on_a_gpu_without_it_is_refused_before_a_rank_joins() -> None:
    require_dtype("bf16", (8, 0))
    require_dtype("fp16", (7, 5))
    with pytest.raises(ConfigError, match=r'compute capability 7.5 have no bf16 .* set precision.params = "fp16"'):
        require_dtype("bf16", (7, 5))
