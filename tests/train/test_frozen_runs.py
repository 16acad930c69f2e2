"""A run with frozen parameters: they stay bit-equal and have no slots, the rest is trained as with constants."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training

FREEZE = ["model.embed_tokens", "model.layers.0"]
LAYOUTS = ({"tp": 2, "dp": 1}, {"tp": 1, "dp": 2}, {"tp": 1, "pp": 2, "dp": 1})


def _is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "model.layers.0."))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.matrix), 3])
def test_frozen_parameters_stay_as_they_are(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, stage: int
) -> None:
    options = {"optimizer": {"grad_clip": 0.0}, "checkpoint": {"every": 1}}
    free = run_training(configure("free", train={"steps": 1}, **options))
    frozen = run_training(configure("frozen", train={"steps": 3, "freeze": FREEZE}, **options))
    assert frozen["loss"][0] == free["loss"][0]
    begun, first, last = (
        Checkpoint.open(tmp_path / run / f"step-{step:08d}")
        for run, step in (("free", 1), ("frozen", 1), ("frozen", 3))
    )
    for name, tensor in last.tensors.items():
        moved = not torch.equal(first.read(name).torch(), last.read(name).torch())
        assert moved != _is_frozen(name), name
        assert ("exp_avg" in tensor.slots) != _is_frozen(name), name
        if not _is_frozen(name):  # gradients do not depend on the other trained parameters
            assert torch.equal(first.read(name, slot="exp_avg").torch(), begun.read(name, slot="exp_avg").torch())
    for number, parallel in enumerate(LAYOUTS):
        config = configure(
            f"layout-{number}",
            train={"steps": 3, "freeze": FREEZE},
            parallel=parallel,
            zero={"stage": stage},
            **options,
        )
        for result in rank_pool.run(run_training, 2, config=config):
            np.testing.assert_allclose(result["loss"], frozen["loss"], rtol=1e-5)
        mine = Checkpoint.open(tmp_path / f"layout-{number}")
        for name in filter(_is_frozen, mine.tensors):
            assert torch.equal(mine.read(name).torch(), last.read(name).torch()), name
