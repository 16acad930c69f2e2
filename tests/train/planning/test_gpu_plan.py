"""The kernels of attention that a plan names for a GPU, by the windows of the model's layers."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.core.cuda import Gpu
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.planning.gpu_plan import describe_gpu, plan_gpu
from tk.train.planning.planned_run import prepare_run

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
WINDOWED = {"architecture": "mistral", "sliding_window": 5}


@pytest.mark.parametrize(
    ("sections", "kernels"),
    [
        ({"precision": {"params": "bf16"}}, [(2, None, "flash")]),
        ({"precision": {"params": "fp32"}}, [(2, None, "efficient")]),
        ({"precision": {"params": "bf16"}, "data": {"packing": "documents"}}, [(2, None, "varlen")]),
        ({"precision": {"params": "bf16"}, "model": WINDOWED}, [(2, 5, "varlen")]),
        ({"precision": {"params": "bf16"}, "parallel": {"cp": 2}}, [(2, None, "tiles")]),
    ],
)
def test_each_window_of_a_model_has_its_kernel(
    configure: Configure, sections: dict[str, Any], kernels: list[tuple[int, int | None, str]]
) -> None:
    run = prepare_run(parse(configure(**sections), TrainConfig, "test"), None)
    found = plan_gpu(run, H100, (2, 13))
    assert [(each.layers, each.window, each.kernel) for each in found.attention] == kernels
    assert len(found.lines()) == 1 + len(kernels)
    assert found.to_json()["capability"] == [9, 0]


def test_a_gpu_without_bf16_is_named_as_a_reason(configure: Configure) -> None:
    run = prepare_run(parse(configure(precision={"params": "bf16"}), TrainConfig, "test"), None)
    lines = plan_gpu(run, Gpu("Tesla T4", (7, 5)), (2, 13)).lines()
    assert lines[0] == "gpu        Tesla T4, compute capability 7.5: fp32 and fp16 only"
    assert "refuse" in lines[1]


def test_a_listed_card_is_described_with_its_data_sheet() -> None:
    assert describe_gpu(H100).endswith("by its data sheet 989 TFLOP/s in bf16 and 3.35 TB/s")
