"""Shared blocks under long random histories over a simulated cache: all that a step reads is what its sample wrote.

A cell of the cache holds a hash of the root, and of all tokens up to its own, that a step made from the cell before. A
block that is stale, overwritten, of another root or shared too early gives another hash.
"""

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from tk.core.errors import Overloaded
from tk.core.integers import ceil_div
from tk.infer.engine.schedule.batch_writer import BatchWriter
from tk.infer.engine.schedule.proposing.proposals import RowCost
from tk.infer.engine.schedule.samples.block_table import BlockKey, BlockTable
from tk.infer.engine.schedule.samples.proposer import Proposer
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.step.persistent_batch import PersistentBatch
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.step_message import decode_message
from tk.tests.infer.engine.schedule.new_sample import new_sample
from tk.tests.infer.full_plan import Planned

BLOCK = 4
VOCAB = 5


def chain(root: bytes, tokens: list[int]) -> list[int]:
    """The cells of a sample."""
    cells = [zlib.crc32(root)]  # the same in every process, unlike a hash of bytes
    for token in tokens:
        cells.append(hash((cells[-1], token)))
    return cells[1:]


@dataclass
class World:
    """A scheduler and workers that are `ahead` steps behind it, under requests whose prompts often begin alike."""

    seed: int
    ahead: int
    speculate: int = 0
    has_twins: bool = False
    cells: dict[int, int] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)  # cells too
    twin_of: dict[int, int] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    live: dict[Sample, int] = field(default_factory=dict)  # and from where on its logits are wanted
    flights: list[tuple[bytes, list[Planned]]] = field(default_factory=list)
    num_arrivals: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.num_blocks = self.random.randint(8, 24)
        slots = self.random.randint(3, 8)
        limits = Limits(slots, 20, self.random.randint(slots, 24), self.num_blocks * BLOCK)
        # The first block and the one that is filled of each sample, and those that a step begins, as far as it can.
        num_twins = 3 * slots + ceil_div(limits.max_batched_tokens, BLOCK) if self.has_twins else 0
        self.policy = Scheduler(limits, self.num_blocks, BLOCK, num_twins)
        self.policy.proposals.row_cost = RowCost({1: 1.0})
        self.writer, self.batch = BatchWriter(slots), PersistentBatch(BLOCK)
        self.texts = [[self.random.randrange(VOCAB) for _ in range(40)] for _ in range(3)]

    def arrive(self) -> None:
        choose, capacity = self.random, self.num_blocks * BLOCK
        text = choose.choice(self.texts)[: choose.randint(1, min(40, capacity - 4))]
        prompt = text + [choose.randrange(VOCAB) for _ in range(choose.choice((0, 0, 1, 3)))]
        prompt, root = prompt[: capacity - 1], choose.choice((b"a", b"a", b"b"))
        wanted = choose.choice((10**9, 10**9, 10**9, choose.randint(0, len(prompt))))
        keys: list[BlockKey] = []
        priority, longest = choose.choice((0, 0, 1)), choose.randint(len(prompt) + 1, capacity)
        self.num_arrivals += 1
        samples = [
            new_sample(
                self.num_arrivals,
                prompt,
                min(longest, len(prompt) + 20),
                index=index,
                priority=priority,
                proposer=Proposer(self.speculate) if self.speculate else None,
            )
            for index in range(choose.choice((1, 1, 1, 3, 5)))
        ]
        for sample in samples:
            sample.table = BlockTable(root, choose.random() < 0.1, wanted, keys)
        try:
            self.policy.add(samples)
        except Overloaded:
            return
        self.live |= dict.fromkeys(samples, wanted)

    def end(self, sample: Sample) -> None:
        self.policy.finish(sample)
        self.writer.release(sample)
        self.seen["preemptions"] += sample.preemptions
        del self.live[sample]

    def step(self) -> bool:
        """Plans a step, and computes those that are due; returns whether there was anything to compute."""
        policy = self.policy
        while any(chunk.proposals for _, planned in self.flights for chunk in planned):
            self.compute(*self.flights.pop(0))
        before = {sample: sample.num_computed for sample in policy.running}
        scheduled = policy.schedule()
        policy.check_integrity()
        for sample in policy.running:
            if sample not in before and sample.num_computed:
                self.seen["hits"] += 1
                assert sample.num_computed <= max(self.live[sample], sample.table.max_reused)
        tables = Counter(block for sample in policy.running for block in sample.table.blocks)
        self.seen["shared"] += any(count > 1 for count in tables.values())
        chunks = [chunk for chunk in scheduled if self.writer.can_write(chunk)]
        if chunks:
            planned = [Planned.of(chunk) for chunk in chunks]
            self.flights.append((self.writer.write(chunks).encode(), planned))
            for chunk, plan in zip(chunks, planned, strict=True):
                assert policy.advance(chunk)
                if plan.samples:
                    chunk.sample.output.tokens.append(UNKNOWN)
        policy.check_integrity()
        was_busy = bool(self.flights)
        while len(self.flights) > (self.ahead if chunks else 0):
            self.compute(*self.flights.pop(0))
        return was_busy

    def compute(self, message: bytes, planned: list[Planned]) -> None:
        plan = self.batch.plan(decode_message(message))
        first, tokens = 0, []
        self.take_blocks(plan)
        for chunk, table in zip(planned, plan.block_tables.tolist(), strict=True):
            sample = chunk.sample
            stop = chunk.stop + len(chunk.proposals)
            slots = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(stop)]
            for i in range(chunk.start, stop):
                assert slots[i] == plan.slots[first + i - chunk.start]
                cell = self.cells[slots[i - 1]] if i else zlib.crc32(sample.table.root)
                self.cells[slots[i]] = hash((cell, int(plan.tokens[first + i - chunk.start])))
                if self.has_twins:
                    self.twins[self.twinned(slots[i])] = self.cells[slots[i]]
            first += stop - chunk.start
            found = [self.cells[slot] for slot in slots]
            known = [*sample.tokens(0, chunk.stop), *chunk.proposals]
            assert found == chain(sample.table.root, known), "a step reads what is not its own"
            near = range(stop) if self.has_twins else ()  # of the first block, and of each query's own
            for i in (i for i in near if i < BLOCK or i // BLOCK >= chunk.start // BLOCK):
                assert self.twins[self.twinned(slots[i])] == found[i], "a twin is not of its block"
            tokens += [cell % VOCAB for cell in found[chunk.stop - 1 :]] if chunk.samples else []
        self.batch.feed(np.array(tokens, np.int32))
        for chunk in planned:
            self.take(chunk, [tokens.pop(0) for _ in range(len(chunk.proposals) + 1 if chunk.samples else 0)])

    def take_blocks(self, plan: RunningPlan) -> None:
        """Gives blocks twins, and blocks and their twins the cells of others, as they are before the step."""
        slots = [(block * BLOCK + i, own * BLOCK + i) for block, own in plan.forks.tolist() for i in range(BLOCK)]
        cells = {own: self.cells.get(slot, 0) for slot, own in slots}
        twins = {own: self.twins.get(self.twinned(slot), 0) for slot, own in slots if self.has_twins}
        self.twin_of |= dict(plan.twins.tolist())
        self.cells |= cells
        self.twins |= {self.twinned(own): cell for own, cell in twins.items()}
        self.seen["forks"] += len(plan.forks)

    def twinned(self, slot: int) -> int:
        """The place of a slot's twin."""
        return self.twin_of[slot // BLOCK] * BLOCK + slot % BLOCK

    def take(self, chunk: Planned, tokens: list[int]) -> None:
        """Gives a sample the tokens that were chosen after its last token and after its proposals."""
        sample = chunk.sample
        for i, token in enumerate(tokens):
            place = chunk.stop + i - sample.num_prompt
            if i and (sample.status is Status.FINISHED or sample.output.tokens[place - 1] != chunk.proposals[i - 1]):
                self.seen["rejected"] += 1
                return
            if i:
                self.policy.accept(sample)
                self.seen["accepted"] += 1
            sample.output.tokens[place] = token
            if sample.status is not Status.FINISHED and chunk.stop + i + 1 == sample.output.max_tokens:
                self.end(sample)


@pytest.mark.parametrize(
    ("ahead", "speculate", "has_twins"),
    [
        (1, 0, True),
        (0, 4, False),
        (1, 6, True),
        pytest.param(0, 0, False, marks=pytest.mark.matrix),
        pytest.param(1, 1, False, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (1, 2))])
def test_every_step_reads_what_its_sequence_wrote(seed: int, ahead: int, speculate: int, has_twins: bool) -> None:
    world = World(seed, ahead, speculate, has_twins)
    for _ in range(500):
        if world.random.random() < 0.3:
            world.arrive()
        if world.live and world.random.random() < 0.05:
            world.end(world.random.choice(list(world.live)))
        world.step()
    steps = 0
    while world.live:
        assert world.step() or not world.live, "a sequence is live and nothing is computed"
        steps += 1
        assert steps < 5000, "the queue does not drain"
    assert min(world.seen["hits"], world.seen["shared"], world.seen["preemptions"]) > 5
    assert world.seen["forks"] > 0
    assert (min(world.seen["accepted"], world.seen["rejected"]) > 5) == (speculate > 0)
    assert world.policy.allocator.num_available == world.num_blocks


def used_blocks(block_size: int, num_new: int, num_twins: int = 0) -> tuple[int, int]:
    """Returns the most blocks that 16 samples of a prompt of 1,000 tokens use, and the tokens that they compute."""
    policy = Scheduler(Limits(16, 100, 512, 2048), 2000, block_size, num_twins)
    samples = [new_sample(0, range(1000), 1000 + num_new, index=i) for i in range(16)]
    policy.add(samples)
    num_computed = most = 0
    while policy.num_live:
        chunks = policy.schedule()
        most = max(most, policy.allocator.num_used)
        for chunk in chunks:
            num_computed += chunk.length
            is_last = chunk.is_last
            policy.advance(chunk)
            if is_last:
                chunk.sample.output.tokens.append(chunk.sample.index)
        policy.check_integrity()
        for sample in samples:
            if sample.num_new == num_new:
                policy.finish(sample)
    return most, num_computed


@pytest.mark.parametrize("num_twins", [0, 100])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_sixteen_samples_hold_the_prompt_once_until_they_store_tokens_of_their_own(
    block_size: int, num_twins: int
) -> None:
    of_prompt, computed = ceil_div(1000, block_size), 1000 + 15  # each computes the prompt's last token for its logits
    assert used_blocks(block_size, 1, num_twins) == (of_prompt, computed)
    for num_new in (3, 8, 32):
        own = ceil_div(1000 + num_new - 1, block_size) - 1000 // block_size
        most = 1000 // block_size + 16 * own
        assert used_blocks(block_size, num_new, num_twins) == (most, computed + 16 * (num_new - 1))


def test_a_prompt_waits_for_one_that_begins_alike() -> None:
    policy = Scheduler(Limits(8, 100, 48, 2048), 200, 4)
    first, again, other = (new_sample(i, [*range(length), i], 200) for i, length in enumerate((80, 80, 30)))
    stranger = new_sample(3, [9] * 10, 200)
    for sample in (first, again, other, stranger):
        policy.add([sample])

    def step() -> list[tuple[Sample, int, int]]:
        chunks = policy.schedule()
        found = [(chunk.sample, chunk.start, chunk.length) for chunk in chunks]
        for chunk in chunks:
            is_last = chunk.is_last
            policy.advance(chunk)
            if is_last:
                chunk.sample.output.tokens.append(7)
        policy.check_integrity()
        return found

    assert step() == [(first, 0, 48)]
    assert step() == [(first, 48, 33)], "33 of 48 tokens: the next one in the queue waits for these"
    assert step() == [(first, 81, 1), (again, 80, 1), (other, 28, 3), (stranger, 0, 10)]


@pytest.mark.parametrize("way", ["cancelled", "decoding", "private"])
def test_a_prompt_waits_for_no_block_that_never_comes(way: str) -> None:
    policy = Scheduler(Limits(8, 100, 16, 2048), 200, 4)
    first, again = (new_sample(i, range(24), 200) for i in range(2))
    first.table.root = b"own" if way == "private" else b""
    policy.add([first])
    for _ in range(2 if way == "decoding" else 1):
        for chunk in policy.schedule():
            policy.advance(chunk)
    if way == "decoding":
        first.output.tokens.append(7)
        policy.allocator.flush()  # its blocks are not found any more
    if way == "cancelled":
        policy.finish(first)
    policy.add([again])
    assert again in {chunk.sample for chunk in policy.schedule()}


def test_samples_whose_first_one_is_cancelled_go_on_with_the_next() -> None:
    policy = Scheduler(Limits(4, 100, 8, 64), 16, 4)
    samples = [new_sample(0, range(30), 32, index=i) for i in range(3)]
    policy.add(samples)
    assert [chunk.sample for chunk in policy.schedule()] == samples[:1]
    policy.finish(samples[0])
    policy.check_integrity()
    assert [chunk.sample for chunk in policy.schedule()] == samples[1:2]
    policy.finish(samples[2])
    policy.check_integrity()
    assert policy.num_live == 1


@dataclass
class Wrong:
    """Makes many proposals once, after `quiet` others that it could have made."""

    quiet: int
    length: int = 0

    def __len__(self) -> int:
        return self.length

    def propose(self, new: list[int], num_unknown: int, most: int) -> tuple[list[int], list[float]]:
        """Proposes as many tokens as may be."""
        self.length += len(new)
        self.quiet -= 1
        count = most if self.quiet == 0 else 0
        return [0] * count, [1.0] * count


def test_blocks_of_proposals_that_did_not_come_true_keep_no_twins() -> None:
    """Sequences make far more proposals than blocks have twins, in turn, and none of them comes true."""
    limits = Limits(4, 0, 8 * BLOCK, 200)
    num_twins = 3 * limits.max_running + ceil_div(limits.max_batched_tokens, BLOCK)
    policy = Scheduler(limits, 200, BLOCK, num_twins)
    policy.proposals.row_cost = RowCost({1: 1.0})
    for number in range(limits.max_running):
        sample = new_sample(number, [1], 200, root=bytes([number]))
        sample.proposer = Wrong(quiet=2 + number)  # type: ignore[assignment]
        policy.add([sample])
    for _ in range(8):
        for chunk in policy.schedule():
            policy.advance(chunk)
            chunk.sample.output.tokens.append(1)
        policy.check_integrity()
    assert [sample.output.num_proposed > 4 * BLOCK for sample in policy.running] == [True] * limits.max_running
