"""Steps of a run whose buckets were filled by one rule go on with the other: no bit depends on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint import Checkpoint
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training


def values(folder: Path) -> dict[tuple[str, str], Any]:
    """Returns every slot of every tensor of a run's newest step."""
    checkpoint = Checkpoint.open(folder)
    return {(tensor, slot): checkpoint.read(tensor, slot=slot).numpy() for tensor, slot in checkpoint.chunks}


@pytest.mark.parametrize(
    "zero", [1, pytest.param(2, marks=pytest.mark.matrix), pytest.param(3, marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize(
    ("first", "then"), [("size", "layer"), pytest.param("layer", "size", marks=pytest.mark.matrix)]
)
def test_a_run_goes_on_with_other_buckets(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, zero: int, first: str, then: str
) -> None:
    def trained(run: str, rule: str, steps: int) -> list[float]:
        sections = {"zero": {"stage": zero, "buckets": rule}, "parallel": {"dp": 2}, "precision": {"params": "bf16"}}
        optimizer = {"grad_clip": 0.0, "warmup_steps": 0, "schedule": "constant"}  # the norm is a sum over buckets
        config = configure(run, train={"steps": steps}, optimizer=optimizer, **sections)
        found = rank_pool.run(run_training, 2, config=config)
        assert found[0] == found[1]
        return found[0]["loss"]  # type: ignore[no-any-return]

    expected = trained("one", first, 4)
    assert trained("other", first, 2) + trained("other", then, 4) == expected
    one, other = values(tmp_path / "one"), values(tmp_path / "other")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[key], other[key]) for key in one)
