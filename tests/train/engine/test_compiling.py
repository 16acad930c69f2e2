"""`[train] compile`: compiled layers give the model of uncompiled ones, in every layout, and share one program."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.parallel.head_loss import RowStatistics, exponential_sums, overwrite_by_gradient
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": {"stage": 3}},
    "tp, sequence parallel": {"parallel": {"tp": 2, "dp": 1, "sequence_parallel": True}},
    "zero bubble": {"parallel": {"pp": 2, "dp": 1, "schedule": "zb-h1"}},
    "selective": {"recompute": {"mode": "selective"}},
    "full": {"recompute": {"mode": "full"}, "zero": {"stage": 3}},
    "mlp in blocks": {"recompute": {"mlp_block": 7}},
    "packed documents": {"data": {"packing": "documents"}},
    "frozen, interleaved": {
        "model": {"num_hidden_layers": 5},
        "train": {"freeze": ["model.layers.0"]},
        "parallel": {"pp": 2, "dp": 1, "schedule": "interleaved", "num_virtual_stages": 2},
    },
    "adapters": {"lora": {"rank": 4}, "zero": {"stage": 3}, "model": {"num_hidden_layers": 4}},
    "adapters with dropout": {"lora": {"rank": 4, "dropout": 0.1}, "model": {"num_hidden_layers": 4}},
    "adapters, base in codes": {"lora": {"rank": 4, "base": "int8"}},
    "adapters, mlp in blocks": {"lora": {"rank": 4, "dropout": 0.1}, "recompute": {"mlp_block": 7}},
    "adapters, tp": {"lora": {"rank": 4, "dropout": 0.1}, "parallel": {"tp": 2, "dp": 1, "sequence_parallel": True}},
    "adapters of experts": {
        "lora": {"rank": 4},
        "model": {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "mixture of experts": {"model": {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}},
}


def run_compiled(config: dict[str, Any]) -> dict[str, Any]:
    """As `run_training`, and how many programs were made."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # or the rest would run uncompiled unseen
        found = run_training(config)
    return found | {"programs": counters["stats"]["unique_graphs"] - before}


@pytest.mark.matrix  # a compiler runs for up to a minute; test_layouts.py has the layouts uncompiled
@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_equal_uncompiled_ones(rank_pool: RankPool, configure: Configure, name: str) -> None:
    sections = {"checkpoint": {"every": 0}} | CASES[name] | {"train": {"steps": 4} | CASES[name].get("train", {})}
    configs = [configure("eager", **sections)]
    sections["train"] = sections["train"] | {"compile": True}
    configs.append(configure("compiled", **sections))
    if "lora" in sections:
        base = configure("base", model=sections.get("model", {}), train={"steps": 1})
        run_training(base)
        for config in configs:
            config["model"] = {"init": base["checkpoint"]["dir"]}
    eager = rank_pool.run(run_training, 2, config=configs[0])[0]
    compiled = rank_pool.run(run_compiled, 2, config=configs[1])[0]
    np.testing.assert_allclose(compiled["loss"], eager["loss"], rtol=1e-5)
    np.testing.assert_allclose(compiled["grad_norm"], eager["grad_norm"], rtol=1e-4)
    assert compiled["programs"]
    if name == "zero 3":
        assert compiled["programs"] == 4, "one of all layers, another one for evaluation, and the steps of the loss"
    if name in ("adapters", "adapters with dropout"):
        assert compiled["programs"] == 5, "the first layer, whose input has no gradient; all others; evaluation; loss"


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_steps_of_the_loss_make_no_copy_of_the_logits(dtype: torch.dtype) -> None:
    """Their results are those of the plain steps, and the only memory that they take has a number for each row."""
    torch._dynamo.reset()
    logits_RV = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    top_R = logits_RV[:, :4000].amax(dim=-1).float()
    sums = torch.compile(exponential_sums, dynamic=False)
    total_R, programs = run_and_get_code(sums, logits_RV[:, :4000], top_R)
    torch.testing.assert_close(total_R, exponential_sums(logits_RV[:, :4000], top_R))
    targets_R1, here_R = torch.randint(0, 4000, (512, 1)), torch.arange(512) % 3 > 0
    rows = RowStatistics(top_R, total_R, targets_R1, here_R, here_R.float().unsqueeze(-1) / 8)
    expected, found = logits_RV.clone(), logits_RV.clone()
    overwrite_by_gradient(expected[:, :4000], rows)
    _, more = run_and_get_code(torch.compile(overwrite_by_gradient, dynamic=False), found[:, :4000], rows)
    torch.testing.assert_close(found, expected)
    made = [size for program in (*programs, *more) for size in re.findall(r"empty_strided_cpu\((.*?\))", program)]
    assert set(made) == {"(512, )"}


def test_without_a_compiler_nothing_is_begun(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"train\] compile = true cannot be done here.*no-such-compiler"):
        Trainer(parse(configure(train={"compile": True}), TrainConfig, "test"))
