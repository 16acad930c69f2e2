"""The predicted duration of steps, against machines whose true costs are known."""

import pytest

from tk.infer.engine.schedule.costs.cost import StepCost, StepSize
from tk.infer.engine.schedule.costs.step_budget import StepBudget
from tk.infer.engine.schedule.waiting.limits import Limits
from tk.infer.engine.schedule.warm_up import row_chunks, warm_up_chunks

LIMITS = Limits(8, 100, 512, 4096)
MACHINES = [(5e-3, 4e-4, 2e-8), (2e-2, 1e-3, 1e-7), (1e-3, 1e-3, 1e-6), (1e-2, 1e-4, 0.0)]


def seconds(machine: tuple[float, float, float], size: StepSize) -> float:
    a, b, c = machine
    return a + b * size.num_tokens + c * size.num_keys


def measured(machine: tuple[float, float, float]) -> StepCost:
    sizes = [StepSize().plus(chunk.start, chunk.length) for chunk in warm_up_chunks(LIMITS, 128, 32)]
    cost = StepCost()
    cost.calibrate((size, seconds(machine, size)) for size in sizes)
    return cost


def test_a_size_counts_the_keys_up_to_each_token() -> None:
    size = StepSize().plus(0, 3).plus(10, 2)
    assert (size.num_tokens, size.num_keys) == (5, 1 + 2 + 3 + 11 + 12)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_few_steps_at_start_give_the_cost(machine: tuple[float, float, float]) -> None:
    cost = measured(machine)
    for start, length in ((0, 1), (0, 100), (0, 512), (1000, 1), (2000, 200)):
        size = StepSize().plus(start, length)
        assert cost.seconds(size) == pytest.approx(seconds(machine, size), rel=0.1)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_cost_follows_a_machine_that_becomes_slower(machine: tuple[float, float, float]) -> None:
    cost = measured(machine)
    slower = (machine[0] * 2, machine[1] * 2, machine[2] * 2)
    size = StepSize().plus(100, 128)
    for _ in range(60):
        cost.observe(size, seconds(slower, size))
    assert cost.seconds(size) == pytest.approx(seconds(slower, size), rel=0.1)


def test_one_hiccup_changes_little_and_an_empty_step_nothing() -> None:
    cost = measured(MACHINES[0])
    size = StepSize().plus(0, 64)
    before = cost.seconds(size)
    cost.observe(size, 60.0)
    assert before < cost.seconds(size) < 1.2 * before
    cost.observe(StepSize(), 1.0)
    assert cost.seconds(size) < 1.2 * before


@pytest.mark.parametrize("start", [0, 700, 3000])
def test_the_longest_chunk_is_the_longest_under_the_bound(start: int) -> None:
    cost = measured(MACHINES[1])
    base = StepSize().plus(50, 1)
    length = cost.longest(base, start, 512, 0.1)
    assert 0 < length < 512
    assert cost.seconds(base.plus(start, length)) <= 0.1 < cost.seconds(base.plus(start, length + 1))
    assert cost.longest(base, start, 5, 0.1) == 5
    assert cost.longest(base, start, 512, 1e-6) == 0


def test_nothing_is_predicted_before_a_step_was_seen() -> None:
    cost = StepCost()
    assert (cost.is_known, cost.seconds(StepSize().plus(0, 10))) == (False, 0.0)
    assert cost.longest(StepSize(), 0, 77, 1e-9) == 77


def test_a_budget_gives_one_prompt_token_beyond_its_bound() -> None:
    budget = StepBudget(16, 1e-6, measured(MACHINES[1]))
    budget.take(5, 1)
    assert budget.take_prompt(0, 100) == 1
    assert budget.room(0, 100) == 0
    unbounded = StepBudget(16, None, StepCost())
    unbounded.take(5, 1)
    assert [unbounded.take_prompt(0, 10), unbounded.take_prompt(0, 10), unbounded.room(0, 1)] == [10, 5, 0]


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(512, 128), (8, 2), (1, 1)])
def test_warm_up_steps_keep_the_limits(max_tokens: int, num_blocks: int) -> None:
    limits = Limits(1, 1, max_tokens, 64)
    for chunk in [*warm_up_chunks(limits, num_blocks, 8), *row_chunks(limits, num_blocks, 8)]:
        assert 1 <= chunk.length <= max_tokens
        num_tokens = chunk.sample.num_tokens + len(chunk.proposals)
        assert chunk.start + chunk.length == num_tokens <= min(64, num_blocks * 8)
        assert all(1 <= block <= num_blocks for block in chunk.sample.table.blocks)
        assert len(chunk.sample.table.blocks) * 8 >= num_tokens


def test_steps_of_rows_have_a_row_for_each_token() -> None:
    chunks = row_chunks(LIMITS, 128, 32)
    assert [chunk.length for chunk in chunks] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48]
    for chunk in chunks:
        assert chunk.is_last
        assert len(chunk.proposals) == chunk.length - 1


def test_every_block_that_a_warm_up_step_writes_has_a_twin_of_its_own() -> None:
    """If blocks have fewer twins: those without one would write to twin 0, which stays zero."""
    chunks = warm_up_chunks(LIMITS, 128, 32, num_twins=20) + row_chunks(LIMITS, 128, 32, num_twins=20)
    for chunk in chunks:
        blocks, twins = chunk.sample.table.twins[::2], chunk.sample.table.twins[1::2]
        written = {position // 32 for position in range(chunk.start, chunk.start + chunk.length)}
        assert blocks == [chunk.sample.table.blocks[i] for i in sorted(written)]
        assert twins == list(range(1, len(blocks) + 1))
        assert len(twins) <= 20
    assert not any(chunk.sample.table.twins for chunk in warm_up_chunks(LIMITS, 128, 32))
