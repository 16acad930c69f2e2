"""Updates: weights that differ after the steps are found, also those of one small tensor on one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.core.config import parse
from tk.parallel.mesh import Mesh
from tk.parity.judge import BOUNDS
from tk.parity.layout import ParityLayout
from tk.parity.measure import ParityTrainer, run_layout, run_reference
from tk.parity.reference_values import ReferenceValues
from tk.parity.subject import Subject
from tk.parity.updates import compare_weights, updated_weights
from tk.tests.rank_pool import RankPool
from tk.train.config.train_config import TrainConfig
from tk.train.zero.sharded_adamw import ShardedAdamW

STEPS = 2
SMALL = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("subject")
    subject = Subject.built_in(folder, STEPS, "fp32")
    subject.prepare(folder)
    return subject


def test_the_difference_is_relative_to_all_weights_together(subject: Subject) -> None:
    trainer = ParityTrainer(subject.config(ParityLayout(tied=True)))
    trainer.step()
    optimizer, table = trainer.engine.optimizer, trainer.spec.table
    weights = updated_weights(optimizer, table)
    assert np.isfinite(weights).all()
    assert weights.size == sum(values.numel() for _, values in optimizer.runs("master"))
    assert compare_weights(optimizer, table, weights) == {"updates": 0}
    other = weights.copy()
    other[7] += 0.5
    assert compare_weights(optimizer, table, other)["updates"] == pytest.approx(0.5 / np.linalg.norm(other))
    other[7] = np.nan
    assert compare_weights(optimizer, table, other)["updates"] == np.inf


def leave_out(optimizer: ShardedAdamW, name: str) -> None:
    """Makes an optimizer leave a tensor as it is, in the part that this rank updates."""
    step = optimizer.step

    def without_one(lr: float, grad_scale: float) -> None:
        runs = [values for shard, values in optimizer.runs("master") if shard.piece.tensor.name == name]
        before = [values.clone() for values in runs]
        step(lr, grad_scale)
        for values, kept in zip(runs, before, strict=True):
            values.copy_(kept)

    optimizer.step = without_one  # type: ignore[method-assign]


class Lazy(ParityTrainer):
    """A trainer whose rank 1 does not update its part of one small tensor."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.mesh.world.rank == 1:
            leave_out(self.engine.optimizer, SMALL)


def updates(config: dict[str, Any], values: str) -> list[float]:
    """Returns the difference of updates at a layout as it is, and with a small tensor that one rank leaves out."""
    parsed = parse(config, TrainConfig, "test")
    mesh = Mesh.build(parsed.layout(2), parsed.model.num_key_value_heads)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (ParityTrainer, Lazy):
            patch.setattr("tk.parity.measure.ParityTrainer", kind)
            result = run_layout(parsed, mesh, ReferenceValues(Path(values), STEPS), lambda message: None)
            found.append(result["updates"])
    return found


def test_a_small_tensor_that_one_rank_does_not_update_is_seen(
    rank_pool: RankPool, subject: Subject, tmp_path: Path
) -> None:
    layout = ParityLayout(dp=2, zero=3, tied=False)
    run_reference(subject.reference(layout), ReferenceValues(tmp_path, STEPS), lambda message: None)
    config = subject.config(layout).model_dump(mode="json")
    bound = BOUNDS["fp32"].updates
    assert bound is not None
    for right, wrong in rank_pool.run(updates, 2, config=config, values=str(tmp_path)):
        assert 0 <= right <= bound < wrong
