"""The executor: loss and gradients of one process, the memory that it keeps, and errors if a neighbour is lost."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tk.core.errors import WorkerDied
from tk.parallel.mesh import ALONE
from tk.tests.rank_pool import RankPool
from tk.tests.train.pipeline.toy_model import (
    ToyStage,
    build,
    executor_of,
    gradients,
    one_process,
    weight_gradients,
    whole_group,
)
from tk.train.pipeline.actions import Action
from tk.train.pipeline.executor import MAX_SENDING
from tk.train.pipeline.simulator import simulate

SHAPES = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)]
MICRO_BATCHES = (1, 3, 4, 8)


def check_equals_one_process(name: str, virtual_stages: int) -> None:
    """Loss and gradients of two successive steps have the bits of one process."""
    pp = whole_group()
    for count in MICRO_BATCHES:
        executor, mine = executor_of(name, virtual_stages, count, pp)
        reference, _ = build(executor.schedule.num_stages, count)
        for _ in range(2):
            loss, expected = executor.run(), one_process(reference, count)
            dist.all_reduce(loss)
            assert loss == expected
            for index, stage in mine.items():
                for grad, other in zip(gradients(stage), gradients(reference[index]), strict=True):
                    assert torch.equal(grad, other), (count, index)
        assert executor.phase == "idle"


@pytest.mark.parametrize(
    ("name", "virtual_stages", "pp"),
    [
        pytest.param(*shape, pp, marks=pytest.mark.matrix if (pp == 4) == (shape[0] == "gpipe") else ())
        for shape in SHAPES
        for pp in (2, 4)
    ],
)
def test_pipeline_equals_one_process(rank_pool: RankPool, name: str, virtual_stages: int, pp: int) -> None:
    rank_pool.run(check_equals_one_process, pp, name=name, virtual_stages=virtual_stages)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_one_rank_alone_accumulates(name: str) -> None:
    executor, mine = executor_of(name, 1, 3, ALONE)
    reference, _ = build(1, 3)
    assert executor.run() == one_process(reference, 3)
    for grad, other in zip(gradients(mine[0]), gradients(reference[0]), strict=True):
        assert torch.equal(grad, other)


def check_evaluation() -> None:
    """Forward only: the loss of one process, and no gradients."""
    for virtual_stages in (1, 2):
        executor, mine = executor_of("forward-only", virtual_stages, 5, whole_group())
        loss = executor.run()
        dist.all_reduce(loss)
        assert loss == one_process(build(executor.schedule.num_stages, 5)[0], 5)
        assert not any(parameter.grad is not None for stage in mine.values() for parameter in stage.parameters())


def test_evaluation_goes_through_the_pipeline(rank_pool: RankPool) -> None:
    rank_pool.run(check_evaluation, 2)


def check_bf16() -> None:
    """bf16 activations and gradients are sent as bf16."""
    executor, mine = executor_of("1f1b", 1, 4, whole_group(), torch.bfloat16)
    reference, _ = build(executor.schedule.num_stages, 4, torch.bfloat16)
    loss, expected = executor.run(), one_process(reference, 4)
    dist.all_reduce(loss)
    assert loss == expected
    for index, stage in mine.items():
        for grad, other in zip(gradients(stage), gradients(reference[index]), strict=True):
            assert grad.dtype is torch.bfloat16
            assert torch.equal(grad, other)


def test_bf16(rank_pool: RankPool) -> None:
    rank_pool.run(check_bf16, 2)


def check_frozen() -> None:
    """A first stage without trainable parameters takes part in the pipeline."""
    executor, mine = executor_of("1f1b", 1, 3, whole_group())
    reference, _ = build(executor.schedule.num_stages, 3)
    for stage in (mine.get(0), reference[0]):
        if stage:
            stage.requires_grad_(False)
    executor.run()
    one_process(reference, 3)
    for index, stage in mine.items():
        for parameter, other in zip(stage.parameters(), reference[index].parameters(), strict=True):
            assert (parameter.grad is None) == (index == 0)
            assert parameter.grad is None or torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]


def test_a_frozen_first_stage(rank_pool: RankPool) -> None:
    rank_pool.run(check_frozen, 2)


def check_hooks(name: str, virtual_stages: int) -> list[str]:
    """Returns the announcements that a stage's gradients are complete, and checks that they are complete then."""
    events: list[str] = []
    complete: dict[int, list[torch.Tensor]] = {}
    incomplete: dict[int, list[torch.Tensor]] = {}

    @contextmanager
    def around(action: Action, last: bool) -> Iterator[None]:
        if last:
            events.append(f"before {action.stage}, {executor.phase}")
            incomplete[action.stage] = weight_gradients(mine[action.stage])
        yield
        if last:
            events.append(f"after {action.stage}")
            complete[action.stage] = [grad.clone() for grad in gradients(mine[action.stage])]

    executor, mine = executor_of(name, virtual_stages, 3, whole_group(), around=around)
    executor.run()
    for stage, grads in complete.items():
        assert all(torch.equal(*pair) for pair in zip(grads, gradients(mine[stage]), strict=True))
        weights = weight_gradients(mine[stage])
        assert not any(torch.equal(*pair) for pair in zip(incomplete[stage], weights, strict=True)), "not put off"
    return events


def test_the_last_backward_of_every_stage_is_announced(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(check_hooks, 2, name="interleaved", virtual_stages=2)
    assert first == [
        "before 2, backward stage 2 micro-batch 2",
        "after 2",
        "before 0, backward stage 0 micro-batch 2",
        "after 0",
    ]
    assert second[0] == "before 3, backward stage 3 micro-batch 2"
    assert rank_pool.run(check_hooks, 2, name="zb-h1", virtual_stages=1)[1] == [
        "before 1, backward weight stage 1 micro-batch 2",
        "after 1",
    ]


class _MemoryProbe:
    """A stage that counts which of its inputs and outputs are still in memory when it is called again."""

    def __init__(self, stage: ToyStage) -> None:
        self.stage = stage
        self.inputs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []
        self.most_inputs = self.most_outputs = 0

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = self.stage(micro_batch, x)
        if x is not None:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        self.most_inputs = max(self.most_inputs, alive(self.inputs))
        self.most_outputs = max(self.most_outputs, alive(self.outputs))
        return y


def alive(storages: list[StorageWeakRef]) -> int:
    """Returns the number of storages that are not freed."""
    return sum(not storage.expired() for storage in storages)


def check_memory(name: str) -> None:
    """Inputs live until their backward, outputs until they are sent, and nothing beyond the step."""
    pp = whole_group()
    executor, mine = executor_of(name, 1, 12, pp)
    watched = _MemoryProbe(mine[pp.rank])
    executor.stages = {pp.rank: watched}
    executor.run()
    in_flight = simulate(executor.schedule).peak_in_flight[pp.rank]
    assert watched.most_inputs == (in_flight if pp.rank else 0)
    if pp.rank < pp.size - 1:
        assert watched.most_outputs <= MAX_SENDING + 2, "the current one, one to be sent, and the sends under way"
    assert alive(watched.inputs) == 0
    assert alive(watched.outputs) == 0


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "forward-only"])
def test_memory_is_that_of_the_simulation(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(check_memory, 4, name=name)


def check_silence() -> str:
    """Rank 1 never runs its part; rank 0 ends with an error within the group's timeout."""
    process_group = dist.new_group(timeout=timedelta(seconds=2))
    executor, _ = executor_of("1f1b", 1, 2, whole_group(process_group))
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(WorkerDied) as raised:
            executor.run()
        message = f"{raised.value} / {executor.phase}"
    dist.barrier()  # rank 1 stays alive until rank 0 has given up
    return message


def test_a_silent_neighbour_ends_in_an_error_that_names_it(rank_pool: RankPool) -> None:
    message = rank_pool.run(check_silence, 2)[0]
    assert "Rank 0 of the pipeline, at backward stage 0 micro-batch 0, waiting for rank 1 of the pipeline" in message
    assert "the gradient of micro-batch 0 from stage 1 did not arrive from rank 1" in message
    assert message.endswith("waiting for rank 1 of the pipeline")


def check_death() -> None:
    """Rank 1 dies in the middle of a step."""
    executor, mine = executor_of("1f1b", 1, 4, whole_group())
    if 1 in mine:
        mine[1].layers[0].register_forward_hook(lambda *_: os._exit(9))
    executor.run()


def test_a_dead_neighbour_ends_in_an_error_not_a_hang(rank_pool: RankPool) -> None:
    with pytest.raises(AssertionError) as raised:
        rank_pool.run(check_death, 2)
    assert re.search(r"WorkerDied: Rank 0 of the pipeline, at (for|back)ward stage 0 .*has died", str(raised.value))
    assert "the rank's process ended with exit code 9" in str(raised.value)
