"""A mixture of experts that is saved at one layout of all axes continues at another."""

import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # seconds: 4 ranks share 2 cores with other tests

EXPERTS = {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MOVES: dict[str, dict[str, Any]] = {  # with the ZeRO stage
    "one": {},
    "dp2 ep2 zero1": {"dp": 2, "ep": 2, "zero": 1},
    "tp2 dp2 ep4 zero2": {"tp": 2, "dp": 2, "ep": 4, "zero": 2},
    "cp2 dp2 ep2 zero3": {"cp": 2, "dp": 2, "ep": 2, "zero": 3},
    "pp2 tp2 expert_tp1": {"pp": 2, "tp": 2, "expert_tp": 1},
    "tp2 dp2 ep2 expert_tp2 zero1": {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 2, "zero": 1},
}


def _at(config: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    axes = {key: value for key, value in layout.items() if key != "zero"}
    return config | {"parallel": {"dp": 1} | axes, "zero": config["zero"] | {"stage": layout.get("zero", 0)}}


def _num_ranks(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))


@pytest.mark.matrix  # test_expert_parallel.py has two layouts in `make test`
@pytest.mark.parametrize(
    "pairs",
    [[*pairwise([*MOVES, "one"]), *((name, name) for name in MOVES)], list(product(MOVES, MOVES))],
    ids=["a ring", "all pairs"],
)
def test_a_mixture_saved_at_any_layout_continues_at_any_other(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    """After two steps at one layout, two at another are as one process would have made them; at the same, in bits."""
    options = {"model": EXPERTS, "train": {"steps": 4, "eval_rows": 2}}
    expected: dict[str, Any] = {}
    for name in dict.fromkeys(("one", *(name for pair in pairs for name in pair))):
        config = _at(configure(f"from {name}", checkpoint={"every": 2}, **options), MOVES[name])
        expected[name] = rank_pool.run(run_training, _num_ranks(MOVES[name]), config=config)[0]
        np.testing.assert_allclose(expected[name]["loss"], expected["one"]["loss"], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(expected[name]["grad_norm"], expected["one"]["grad_norm"], rtol=1e-4, err_msg=name)
        saved = Checkpoint.open(tmp_path / f"from {name}" / "step-00000002")
        assert saved.layout.to_json().items() >= MOVES[name].items()
        assert saved.verify().ok
    for source, name in pairs:
        begun = tmp_path / f"from {source}" / "step-00000002"
        config = _at(configure(f"{source} to {name}", **options), MOVES[name])
        result = rank_pool.run(run_training, _num_ranks(MOVES[name]), config=config, resume=str(begun))[0]
        rtol = 0.0 if name == source else 1e-5
        np.testing.assert_allclose(result["loss"], expected[name]["loss"][2:], rtol=rtol, err_msg=f"{source}, {name}")
