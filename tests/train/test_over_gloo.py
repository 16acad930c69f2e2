"""GPUs that train over gloo, as ranks that share one GPU do: messages go through the host, and values are the CPU's."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tk.parallel import grouped_products, products, wide_sums
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.zero import adamw_rule

EXPERTS = {"architecture": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp and dp": {"parallel": {"tp": 2, "dp": 2, "sequence_parallel": True}, "zero": {"stage": 2}},
    "pp": {"parallel": {"pp": 2, "schedule": "1f1b"}},
    "zb-h1 and tp": {"parallel": {"pp": 2, "tp": 2, "schedule": "zb-h1"}},
    "cp gather": {"parallel": {"cp": 2, "cp_mode": "gather"}, "zero": {"stage": 3}},
    "cp ulysses": {"parallel": {"cp": 2, "cp_mode": "ulysses"}},
    "ep": {"parallel": {"dp": 2, "ep": 2}, "model": EXPERTS},
}


def values_of_two_steps(config: dict[str, Any], on_gpu: bool) -> list[float]:
    """Trains two steps on this rank; returns losses and gradient norms."""
    with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.MATH):
        patch.setattr(products, "_WITHOUT_KERNELS", frozenset())
        patch.setattr(wide_sums, "_torch_sums_in_fp32", lambda weight: True)
        patch.setattr(adamw_rule, "native_adamw", lambda: None)
        patch.setattr(grouped_products, "_has_kernel", lambda device, dtype: False)
        if not on_gpu:
            trainer = make_trainer(config, device=torch.device("cpu"))
            return [value for result in (trainer.step(), trainer.step()) for value in (result.loss, result.grad_norm)]
        with pretend_gpu(over_gloo=True) as gpu:
            trainer = make_trainer(config, device=GPU)
            results = [trainer.step(), trainer.step()]
        assert gpu.num_operations > 1000
        return [value for result in results for value in (result.loss, result.grad_norm)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "pp" else pytest.mark.matrix) for name in LAYOUTS]
)
def test_layouts_over_gloo_have_the_values_of_cpus(rank_pool: RankPool, configure: Configure, name: str) -> None:
    sections = LAYOUTS[name]
    model = {"num_key_value_heads": 4} | sections.get("model", {})
    config = configure(**sections | {"model": model, "train": {"steps": 2}})
    ranks = 4 if name in ("tp and dp", "zb-h1 and tp") else 2
    found = rank_pool.run(values_of_two_steps, ranks, config=config, on_gpu=True)
    expected = rank_pool.run(values_of_two_steps, ranks, config=config, on_gpu=False)
    for mine, right in zip(found, expected, strict=True):
        assert mine == pytest.approx(right, rel=1e-6)
