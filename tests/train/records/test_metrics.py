"""metrics.jsonl: lines that outlive a crash, lines that a resumed run makes again, and the peak rate of a device."""

import json
import time
from pathlib import Path

import pytest
import torch

from tk.train.records import metrics
from tk.train.records.metrics import MetricsFile, memory_bytes, peak_flops


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, 0, "attempt")
    file.write(1, loss=2.5, grad_norm=None)
    assert lines(tmp_path) == [{"step": 1, "loss": 2.5, "grad_norm": None}]
    file.write(2, loss=2.25)
    assert lines(tmp_path)[1:] == [{"step": 2, "loss": 2.25}]
    file.close()


def test_a_resumed_run_keeps_whole_lines_of_steps_that_it_does_not_make_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "eval_loss": 3.0}\n[1]\n{"loss": 2.0}\n{"step": 3}\n{"step": 2, "lo')
    file = MetricsFile(tmp_path, 2, "attempt")
    assert lines(tmp_path) == [{"step": 1}, {"step": 2, "eval_loss": 3.0}]
    file.write(3, loss=1.0)
    file.close()
    assert lines(tmp_path)[2:] == [{"step": 3, "loss": 1.0}]
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl"], "no temporary file remains"


@pytest.mark.parametrize("end", [b'{"step": 2}', b'{"step": 2}\n\xff\0\0'], ids=["no end of line", "no text"])
def test_lines_after_a_crash_stay_lines_of_their_own(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + end)
    file = MetricsFile(tmp_path, 2, "attempt")
    file.write(3, loss=1.0)
    file.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-40GB", torch.float16, 312e12),
    ],
)
def test_a_known_gpu_has_the_rate_of_its_data_sheet(
    name: str, dtype: torch.dtype, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops.__wrapped__(torch.device("cuda", 0), dtype, 0) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_of_a_cpu_is_that_of_its_fastest_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a test sets: the products, which the model's own function makes, take 3, 1 and 2 seconds."""
    products: list[torch.Tensor] = []
    monkeypatch.setattr(metrics, "matmul", lambda left, right: products.append(left))
    ticks = iter([0.0, 0.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 6.0, 9.0])
    monkeypatch.setattr(metrics, "_MEASURING_SECONDS", 5.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert peak_flops.__wrapped__(torch.device("cpu"), dtype, 0) == 2 * 1024**3 / 1.0
    assert [(left.shape, left.dtype) for left in products] == [((1024, 1024), dtype)] * 3


def test_memory_is_the_most_that_this_process_had() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib, unit = status["VmHWM"].split()
    assert unit == "kB"
    assert memory_bytes(torch.device("cpu")) == pytest.approx(int(kib) * 1024, rel=0.05)
