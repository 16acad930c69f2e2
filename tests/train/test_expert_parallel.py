"""Training with experts on different ranks against one process, and runs that continue at another spread of experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.core.config import parse
from tk.core.errors import ParallelError
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.train.config.train_config import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # seconds: 4 ranks share 2 cores with other tests

MODEL = {
    "architecture": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "ep 4 over tp 2 and dp 2": {"parallel": {"tp": 2, "dp": 2, "ep": 4}, "zero": {"stage": 1}},
    "ep 2, replicated": {"parallel": {"dp": 4, "ep": 2}, "zero": {"stage": 3, "shard_size": 2}},
    "ep 2, each expert cut": {"parallel": {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 2}, "zero": {"stage": 2}},
    "ep 4 over cp 2 and dp 2": {"parallel": {"cp": 2, "dp": 2, "ep": 4}, "zero": {"stage": 2}},
    "ep 2 over cp 2 and tp 2": {"parallel": {"cp": 2, "tp": 2, "ep": 2}, "zero": {"stage": 1}},
    "ep 2, pp 2": {"parallel": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1"}, "zero": {"stage": 2}},
}
CHOSEN = ["ep 4 over tp 2 and dp 2", "ep 2, replicated"]  # of `make test`; `tk parity` has more


def configured(configure: Configure, run: str, layout: str, recompute: str = "none") -> dict[str, Any]:
    options = {"steps": 4, "eval_rows": 2, "router_z_loss_coef": 0.05}
    config = configure(run, model=MODEL, train=options, recompute={"mode": recompute}, checkpoint={"every": 2})
    for section, keys in LAYOUTS.get(layout, {"parallel": {"dp": 1}}).items():
        config[section] = config.get(section, {}) | keys
    return config


@pytest.mark.parametrize("layouts", [CHOSEN, pytest.param(list(LAYOUTS), marks=pytest.mark.matrix)], ids=["few", "all"])
def test_experts_on_different_ranks_train_as_in_one_process_and_continue_elsewhere(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, layouts: list[str]
) -> None:
    gradients = str(tmp_path / "gradients.npy")
    expected = run_training(configured(configure, "one", "one"), gradients=gradients)
    for number, layout in enumerate(layouts):
        config = configured(configure, layout, layout, recompute="full" if number == 0 else "none")
        for result in rank_pool.run(run_training, 4, config=config, gradients=gradients):
            np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5, err_msg=layout)
            np.testing.assert_allclose(result["grad_norm"], expected["grad_norm"], rtol=1e-4, err_msg=layout)
            for name in ("balance_loss", "z_loss"):
                np.testing.assert_allclose(result[name], expected[name], rtol=1e-5, err_msg=layout)
            assert result["gradients"] <= 1e-5, f"{layout}: {result['parameter']}"
    for source, layout in zip(layouts, [*layouts[1:], "one"], strict=True):
        begun = str(tmp_path / source / "step-00000002")
        config = configured(configure, f"{source} to {layout}", layout)
        if layout == "one":
            result = run_training(config, resume=begun)
        else:
            result = rank_pool.run(run_training, 4, config=config, resume=begun)[0]
        np.testing.assert_allclose(result["loss"], expected["loss"][2:], rtol=1e-5, err_msg=f"{source} to {layout}")


def test_an_ep_that_does_not_fit_is_refused(configure: Configure) -> None:
    config = configure("refused", model=MODEL, parallel={"dp": 2, "ep": 4})
    with pytest.raises(ParallelError, match=r"\[parallel\] and \[zero\]: ep x expert_tp = 4 x 1 does not divide"):
        parse(config, TrainConfig, "test").layout(2)
