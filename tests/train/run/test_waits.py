"""A step on a GPU, as far as a machine without one can tell: where the host waits for the GPU, and where not."""

from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tk.parallel import grouped_products, products, wide_sums
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.zero import adamw_rule

EXPERTS = {"architecture": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
BIASED = {"architecture": "glm4_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": {"params": "fp32"}},
    "fp16": {"precision": {"params": "fp16"}},
    "experts, stage 3": {"model": EXPERTS, "zero": {"stage": 3}, "recompute": {"mode": "selective"}},
    "experts with biases": {"model": BIASED, "train": {"steps": 3, "router_bias_update_rate": 0.01}},
    "documents": {"data": {"packing": "documents"}, "recompute": {"mode": "full"}},
    "window": {"model": {"architecture": "mistral", "sliding_window": 5}},
    "stage 1": {"zero": {"stage": 1}},
    "stage 2": {"zero": {"stage": 2}},
    "z-loss": {"model": EXPERTS, "train": {"steps": 3, "router_z_loss_coef": 0.01}},
}
CHOICE = ("fp16", "experts, stage 3")
# The number of targets, by which each loss is divided, and the sums that say whether the step may update.
WAITS = [
    "train/run/trainer.py _count_tokens: reads __int__",
    "train/engine/optimizer_step.py agree: reads tolist",
]


MARKED = [pytest.param(name, marks=() if name in CHOICE else pytest.mark.matrix) for name in RUNS]


@pytest.mark.parametrize("name", MARKED)
def test_the_host_waits_twice_in_a_step(configure: Configure, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(products, "_WITHOUT_KERNELS", frozenset())
    monkeypatch.setattr(wide_sums, "_torch_sums_in_fp32", lambda weight: True)
    monkeypatch.setattr(adamw_rule, "native_adamw", lambda: None)
    monkeypatch.setattr(grouped_products, "_has_kernel", lambda device, dtype: True)
    sections = {"precision": {"params": "bf16"}, "optimizer": {"grad_clip": 0.01}, "train": {"steps": 3}} | RUNS[name]
    config = configure(**sections)
    with pretend_gpu() as gpu, sdpa_kernel(SDPBackend.MATH):
        trainer = make_trainer(config, device=GPU)
        trainer.step()
        before = len(gpu.waits)
        trainer.step()
    assert gpu.waits[before:] == WAITS
