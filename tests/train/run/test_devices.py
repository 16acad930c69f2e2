"""Training on a GPU, as far as a machine without one can tell.

No operation of a step has tensors of two devices, and the step gives the bits of the CPU where both compute alike.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tk.checkpoint.read.reader import Checkpoint
from tk.parallel import fusion, products, wide_sums
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.tests.train.test_offload import same_bits
from tk.train.zero import adamw_rule

EXPERTS = {"architecture": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3_moe": EXPERTS}
CHOICE = {("llama", 3, "bf16"), ("qwen3_moe", 0, "fp32")}


def alike(patch: pytest.MonkeyPatch) -> None:
    """Makes both devices compute as one that has kernels for 16 bits and takes a CPU's chains of operators."""
    patch.setattr(products, "_WITHOUT_KERNELS", frozenset())
    patch.setattr(fusion, "has_few_kernels", lambda tensor: False)
    patch.setattr(wide_sums, "_torch_sums_in_fp32", lambda weight: True)
    patch.setattr(adamw_rule, "native_adamw", lambda: None)


def trained(config: dict[str, Any], device: torch.device) -> list[Any]:
    """Returns losses and gradient norms of two steps, and then the masters and moments of every bucket."""
    trainer = make_trainer(config, device=device)
    found: list[Any] = []
    with sdpa_kernel(SDPBackend.MATH):  # which torch takes for the other device
        for _ in range(2):
            result = trainer.step()
            found += [result.loss, result.grad_norm, result.balance_loss]
    for slot in ("exp_avg", "exp_avg_sq", "master"):
        found += [values.tolist() for _, values in trainer.engine.optimizer.runs(slot)]
    return found


@pytest.mark.parametrize(
    ("model", "zero", "dtype"),
    [
        pytest.param(*each, marks=() if each in CHOICE else pytest.mark.matrix)
        for each in ((model, zero, dtype) for model in MODELS for zero in range(4) for dtype in ("fp32", "bf16"))
    ],
)
def test_every_operation_of_a_step_has_tensors_of_one_device(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, model: str, zero: int, dtype: str
) -> None:
    alike(monkeypatch)
    kv_heads = 4 if dtype == "fp32" else 2  # a GPU repeats fewer for fp32, which changes the order of their sums
    config = configure(
        model=MODELS[model] | {"num_key_value_heads": kv_heads},
        zero={"stage": zero},
        precision={"params": dtype},
        optimizer={"grad_clip": 0.01},
        train={"steps": 2},
    )
    expected = trained(config, torch.device("cpu"))
    with pretend_gpu() as gpu:
        found = trained(config, GPU)
    assert gpu.num_operations > 1000
    assert found == expected


@pytest.mark.parametrize(
    ("model", "zero", "dtype"),
    [
        pytest.param(*each, marks=() if each == ("llama", 2, "bf16") else pytest.mark.matrix)
        for each in ((model, zero, dtype) for model in MODELS for zero in range(4) for dtype in ("fp32", "bf16"))
    ],
)
def test_a_run_that_saves_and_goes_on_has_the_bits_of_the_cpu(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, zero: int, dtype: str
) -> None:
    """Steps are saved beside the training that goes on; another trainer loads the second one."""
    alike(monkeypatch)
    for name, device in (("cpu", torch.device("cpu")), ("gpu", GPU)):
        with sdpa_kernel(SDPBackend.MATH), pretend_gpu():
            for steps in (2, 3):
                config = configure(
                    name,
                    model=MODELS[model] | {"num_key_value_heads": 4 if dtype == "fp32" else 2},
                    zero={"stage": zero},
                    precision={"params": dtype},
                    optimizer={"schedule": "constant", "warmup_steps": 0},
                    train={"steps": steps},
                    checkpoint={"every": 1},
                )
                make_trainer(config, device=device).fit()
    for step in range(1, 4):
        same_bits(*(Checkpoint.open(tmp_path / name / f"step-{step:08d}") for name in ("cpu", "gpu")))


@pytest.mark.parametrize("add", [torch.Tensor.add_, lambda there, here: torch._foreach_add_([there], [here])])
def test_a_mix_of_devices_is_an_error_also_in_an_operation_without_results(add: Callable[..., object]) -> None:
    with pretend_gpu():
        there = torch.ones(2, device=GPU)
        add(there, torch.ones(2).to(GPU))
        assert there.tolist() == [2.0, 2.0]
        with pytest.raises((RuntimeError, AssertionError), match=r"device|tensors of"):
            add(there, torch.ones(2))
