"""Gathers of updated parameters that go on beside the next step: started with each bucket, awaited before its use."""

from typing import Any

import pytest
import torch

from tk.parallel.collectives import PendingResult, start_all_gather_flat
from tk.parallel.mesh import Group
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.engine.stages import update_waits
from tk.train.zero import sharded_adamw
from tk.train.zero.adamw_rule import AdamWFactors

STEPS = 3


class LateGather:
    """The work of a gather that moves nothing before it is awaited: a reader that does not wait reads old values."""

    def __init__(self, output: torch.Tensor, part: torch.Tensor, group: Group) -> None:
        self._arguments = (output, part.clone(), group)

    def wait(self) -> object:
        return start_all_gather_flat(*self._arguments).wait()


def late(output: torch.Tensor, part: torch.Tensor, group: Group) -> PendingResult:
    return PendingResult(output, LateGather(output, part, group))


def trained(config: dict[str, Any], leaves: bool) -> dict[str, Any]:
    """Returns losses and the evaluation at the end, and how many gathers each step began and left under way."""
    with pytest.MonkeyPatch.context() as patch:
        trainer = make_trainer(config, resume="never")
        optimizer, counts = trainer.engine.optimizer, []
        if leaves:
            patch.setattr(sharded_adamw, "start_all_gather_flat", late)
            trainer.engine.gather_behind(update_waits(trainer.stages, trainer.engine.buffers))
        losses = []
        for _ in range(STEPS):
            losses.append(trainer.step().loss)
            counts.append(len(optimizer._gathers))
        evaluation = trainer._evaluate()
        left = len(optimizer._gathers)
        optimizer.finish()
        return {"losses": losses, "evaluation": evaluation, "counts": counts, "left": left}


ROWS: list[Any] = [
    ({"dp": 2}, 1, {}),
    pytest.param({"dp": 2}, 2, {"tie_word_embeddings": True}, marks=pytest.mark.matrix),
    pytest.param(
        {"dp": 2, "pp": 2, "schedule": "interleaved", "num_virtual_stages": 2},
        2,
        {"num_hidden_layers": 4, "tie_word_embeddings": True},
        marks=pytest.mark.matrix,
    ),
]


@pytest.mark.parametrize(("parallel", "zero", "model"), ROWS)
def test_every_reader_waits_for_the_gather_of_its_parameters(
    rank_pool: RankPool, configure: Configure, parallel: dict[str, Any], zero: int, model: dict[str, Any]
) -> None:
    config = configure(model=model, parallel=parallel, zero={"stage": zero}, train={"steps": STEPS})
    ranks = 2 * parallel.get("pp", 1)
    expected = rank_pool.run(trained, ranks, config=config, leaves=False)
    found = rank_pool.run(trained, ranks, config=config, leaves=True)
    for here, there in zip(found, expected, strict=True):
        assert here["losses"] == there["losses"]
        assert here["evaluation"] == there["evaluation"]
        assert min(here["counts"]) > 1, "a step leaves the gathers of its buckets under way"
        assert here["left"] == 0, "an evaluation reads all of them"
        assert there["counts"] == [0] * STEPS


def order_of_a_step(config: dict[str, Any]) -> list[str]:
    """Returns what the second step of this rank does with its first two buckets, in order."""
    trainer = make_trainer(config, resume="never")
    optimizer, seen = trainer.engine.optimizer, []
    names = {bucket.params.data_ptr(): str(index) for index, bucket in enumerate(trainer.engine.buffers.buckets)}
    update, start = optimizer._update, start_all_gather_flat

    def updated(bucket: Any, each: Any, factors: AdamWFactors) -> None:
        seen.append(f"update {each.bucket}")
        update(bucket, each, factors)

    def started(output: torch.Tensor, part: torch.Tensor, group: Group) -> PendingResult:
        name = names[output.data_ptr()]
        seen.append(f"gather {name}")

        def awaited(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(f"await {name}")
            return tensor

        return start(output, part, group).then(awaited)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_update", updated)
        patch.setattr(sharded_adamw, "start_all_gather_flat", started)
        trainer.engine.gather_behind(update_waits(trainer.stages, trainer.engine.buffers))
        trainer.step()
        seen.append("next step")
        trainer.step()
    return seen


def test_a_gather_starts_with_its_bucket_and_ends_before_its_layer(rank_pool: RankPool, configure: Configure) -> None:
    config = configure(parallel={"dp": 2}, zero={"stage": 1}, train={"steps": 2})
    for seen in rank_pool.run(order_of_a_step, 2, config=config):
        last = max(int(each.split()[1]) for each in seen if each.startswith("update"))
        assert seen[:4] == [f"update {last}", f"gather {last}", f"update {last - 1}", f"gather {last - 1}"]
        step = seen[: 3 * (last + 1) + 1]
        assert step.index("next step") == 2 * (last + 1), "nothing is awaited before the next step"
        assert {each for each in step if each.startswith("await")} == {f"await {index}" for index in range(last + 1)}
