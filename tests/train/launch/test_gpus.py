"""Ranks against the GPUs of a machine: too few are named before a rank starts, or before torch takes one."""

import pytest
import torch

from tk.core.errors import ParallelError, TkError
from tk.train.launch import gpus, worker
from tk.train.launch.gpus import require_gpus


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
        assert worker._device(deterministic=False) == torch.device(device)
        assert taken == [torch.device(device)]
        return
    with pytest.raises(TkError, match=device):
        worker._device(deterministic=False)
    assert not taken
