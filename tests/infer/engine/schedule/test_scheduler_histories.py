"""The scheduler under long random histories of everything at once: no leak, no starvation, balanced books each step."""

import hashlib
import random
from dataclasses import dataclass, field
from typing import Final

import pytest

from tk.core.errors import DeadlinePassed, Overloaded
from tk.core.integers import ceil_div
from tk.infer.engine.schedule.samples.sample import Sample, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.step_cost import StepSize
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.infer.engine.schedule.new_sample import new_sample

BLOCK = 4
NUM_STEPS = 1500
# Of all plans of a history of one principal, as they were before places were dealt by shares.
PLANS_ALONE: Final = (
    "8c0968010d0d955d6fcf34fe557ddc88553624d9b8341f442b1e505a8bc3609b",
    "37ef1ca6e03b6d9ddedf8b502e97b8b01342da0722b0e0906a2a2f59fed4a7be",
    "6bab1ba3d081e569890c6c3b6cb4f2d487283a9943058c6b35930a5e5fcaaa45",
    "344bf8f5e71420f49373c2254ee4459d29f91d23be91af715cf577c1366d8c50",
)


@dataclass
class World:
    """A scheduler, the samples that it was given, and a clock that its steps move."""

    seed: int
    principals: tuple[str, ...] = ("a", "a", "b", "c")
    samples: list[Sample] = field(default_factory=list)
    now: float = 0.0
    num_refused: int = 0
    plans: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)
        self.num_blocks = self.choose.randint(3, 14)
        max_running = self.choose.randint(1, 6)
        bound = self.choose.choice((None, 0.004, 0.02))
        limits = Limits(max_running, 30, self.choose.randint(max_running, 24), self.num_blocks * BLOCK, bound)
        # every second world has twins: the first block and the one that is filled of each sample, and a step's
        num_twins = 3 * max_running + ceil_div(limits.max_batched_tokens, BLOCK) if self.seed % 2 else 0
        self.policy = Scheduler(limits, self.num_blocks, BLOCK, num_twins)

    def arrive(self) -> None:
        """Submits a request of up to 3 samples, which may be refused."""
        choose, capacity = self.choose, self.num_blocks * BLOCK
        num_prompt = choose.randint(1, capacity - 1)
        longest = [choose.randint(num_prompt + 1, capacity) for _ in range(choose.choice((1, 1, 1, 3)))]
        priority, principal = choose.randint(-1, 1), choose.choice(self.principals)
        deadline = self.now + choose.uniform(-0.01, 1.0) if choose.random() < 0.2 else None
        weight = {"a": 1.0, "b": 2.0, "c": 0.25}[principal]
        new = [
            new_sample(
                len(self.samples),
                [0] * num_prompt,
                most,
                index=index,
                priority=priority,
                principal=principal,
                deadline=deadline,
                weight=weight,
            )
            for index, most in enumerate(longest)
        ]
        try:
            self.policy.add(new, self.now)
        except (DeadlinePassed, Overloaded):
            self.num_refused += 1
        else:
            self.samples += new

    def step(self) -> int:
        """Carries out one step and checks it; returns its number of tokens."""
        policy = self.policy
        for sample in policy.expire(self.now):
            assert sample.status is Status.FINISHED
        chunks = policy.schedule()
        policy.check_integrity()
        self.plans.append(tuple(n for c in chunks for n in (*c.sample.order, c.start, c.length)))
        size = StepSize()
        for chunk in chunks:
            assert chunk.start == chunk.sample.num_computed
            assert 1 <= chunk.length <= chunk.sample.num_uncomputed
            assert chunk.start + chunk.length <= len(chunk.sample.table.blocks) * BLOCK
            size = size.plus(chunk.start, chunk.length)
        assert len({chunk.sample for chunk in chunks}) == len(chunks)
        assert size.num_tokens <= policy.limits.max_batched_tokens
        assert bool(chunks) == bool(policy.num_live)
        computed = {chunk.sample for chunk in chunks}
        same = [s for s in policy.running if s.request.priority == policy.running[0].request.priority]
        first = {s.request.principal: s for s in reversed(same)}
        assert not first or computed & set(first.values()), "a principal's oldest of the highest priority goes on"
        for chunk in chunks:
            last = chunk.is_last
            assert policy.advance(chunk)
            if last:
                chunk.sample.output.tokens.append(0)
                if chunk.sample.num_tokens == chunk.sample.output.max_tokens:
                    policy.finish(chunk.sample)
        seconds = 1e-3 + 2e-4 * size.num_tokens + 1e-6 * size.num_keys
        policy.observe(chunks, seconds)
        self.now += seconds
        policy.check_integrity()
        return size.num_tokens


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.matrix if seed > 1 else ()) for seed in range(8)]
)
def test_thousands_of_steps_leak_nothing_and_everything_ends(seed: int) -> None:
    world = World(seed)
    choose = world.choose
    for _ in range(NUM_STEPS):
        for _ in range(choose.choice((0, 0, 0, 0, 1, 2))):
            world.arrive()
        live = [*world.policy.running, *world.policy.queue.waiting]
        if live and choose.random() < 0.05:
            world.policy.finish(choose.choice(live))
        world.step()
    work = sum(s.output.max_tokens for s in (*world.policy.running, *world.policy.queue.waiting))
    steps = 0
    while world.policy.num_live:
        assert world.step(), "a sequence is live and nothing is computed"
        steps += 1
        assert steps < 50 * work, "the queue does not drain"
    assert all(sample.status is Status.FINISHED for sample in world.samples)
    assert all(not sample.table.blocks for sample in world.samples)
    assert world.policy.allocator.num_available == world.num_blocks
    assert sum(sample.preemptions for sample in world.samples) > 0 or world.policy.limits.max_running == 1
    assert world.num_refused > 0


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (2, 3))])
def test_one_principal_alone_has_the_plans_of_a_scheduler_without_shares(seed: int) -> None:
    world = World(seed, ("a",))
    for _ in range(NUM_STEPS):
        for _ in range(world.choose.choice((0, 0, 0, 0, 1, 2))):
            world.arrive()
        world.step()
    assert hashlib.sha256(repr(world.plans).encode()).hexdigest() == PLANS_ALONE[seed]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (2, 3))])
def test_the_oldest_of_a_stream_that_never_ends_is_served(seed: int) -> None:
    """While others keep coming, of one principal or each of a new one, the largest request ends too."""
    world = World(seed)
    policy = world.policy
    capacity = world.num_blocks * BLOCK
    victim = new_sample(0, [0] * (capacity - 4), capacity)
    arrival = 0
    for number in range(200 * capacity):
        if number == 20:
            victim.arrival = arrival = arrival + 1
            policy.add([victim])
        while len(policy.queue.waiting) < (10 if number < 20 else 25):
            arrival += 1
            name = "" if seed % 2 or number < 20 else f"p{arrival}"
            policy.add([new_sample(arrival, [0], 8, principal=name)])
        world.step()
        if victim.status is Status.FINISHED:
            return
    pytest.fail(f"the largest request has {victim.num_new} tokens and {victim.preemptions} preemptions")
