"""The resident memory of training processes on a CPU is that of `tk plan`, malloc's free room included."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tk.benchmarks.bench_training_memory import CONFIGURATIONS, Sections, configuration, measure

SMALL: Final[Sections] = {
    "model": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
    "train": {"micro_batch_size": 2, "global_batch_size": 4},
    "recompute": {"mode": "full"},
}
FARTHER: Final = ("pp 2, full", "experts, full")  # up to 18 % off, see docs/benchmarks/training_memory.md
BF16_PRODUCTS: Final = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # without copies in fp32, which plans count


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "sections"),
    [
        pytest.param("small", SMALL, id="small, full"),
        *(pytest.param(*item, id=item[0]) for item in CONFIGURATIONS.items()),
    ],
)
def test_ranks_take_the_memory_of_their_plan(corpus: Path, name: str, sections: Sections) -> None:
    data: dict[str, Any] = {"sources": [{"path": str(corpus / "tokens")}], "eval_fraction": 0.3}
    measurements = list(measure(name, configuration(data, sections)))
    assert measurements
    far = name in FARTHER or (BF16_PRODUCTS and "bf16" in name)
    for each in measurements:
        assert each.measured == pytest.approx(each.planned, rel=0.25 if far else 0.15), f"rank {each.rank}"
