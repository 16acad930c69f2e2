"""A process takes its GPU and joins its group: torch's functions are replaced, as no GPU is at hand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tk.parallel.gpu_start import join_group, take_gpu


@pytest.mark.parametrize(("tf32", "precision"), [(False, "highest"), (True, "high")])
def test_a_gpu_is_taken_with_a_rule_for_fp32(tf32: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    assert take_gpu(1, tf32) == torch.device("cuda:1")
    assert calls == [torch.device("cuda:1"), precision]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", ("gloo", {"rank": 1})),
        ("cuda:1", ("nccl", {"rank": 1, "device_id": torch.device("cuda:1")})),
    ],
)
def test_nccl_knows_the_device_of_its_rank(
    device: str, expected: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: found.append((backend, options)))
    join_group(torch.device(device), rank=1)
    assert found == [expected]
