"""The persistent batch: random traffic gives, step by step, the plans that are read anew from all sequences."""

import random
from collections import Counter
from dataclasses import fields, replace
from typing import cast

import numpy as np
import pytest

from tk.infer.engine.grammar.grammar import Matcher
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.batch_writer import BatchWriter
from tk.infer.engine.schedule.samples.scheduled_chunk import ScheduledChunk
from tk.infer.engine.schedule.samples.sequence import UNKNOWN, Sequence, Status
from tk.infer.engine.schedule.samples.speculation import Speculation
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.limits import Limits
from tk.infer.engine.step.persistent_batch import PersistentBatch
from tk.infer.engine.step.step_message import NextTokens, decode_message
from tk.infer.engine.step.step_plan import SAMPLE, SamplingRow, SamplingRows, StepPlan
from tk.tests.infer.full_plan import Planned, full_plan

STOPPING = (3, 4)
BLOCK_SIZE, NUM_BLOCKS = 4, 11
VOCAB = 11


def assert_same(found: StepPlan, expected: StepPlan) -> None:
    """Fails if two plans differ in the values or the type of an array."""
    pairs = [(f.name, getattr(found, f.name), getattr(expected, f.name)) for f in fields(StepPlan) if f.name != "rows"]
    pairs += [(f.name, getattr(found.rows, f.name), getattr(expected.rows, f.name)) for f in fields(SamplingRows)]
    for name, one, two in pairs:
        assert one.dtype == two.dtype, name
        assert one.shape == two.shape, name
        assert np.array_equal(one, two), f"{name}: {one} is not {two}"


def next_token(tokens: list[int]) -> int:
    """Returns the token that a deterministic model chooses after these; it repeats itself for a while."""
    return hash((len(tokens) // 20, *tokens[-2:])) % VOCAB


class SimulatedCache:
    """A cache that remembers the sequence and position of every token, and checks the tokens that attention reads."""

    def __init__(self, num_blocks: int) -> None:
        self.slots = np.full(((num_blocks + 1) * BLOCK_SIZE, 2), -1)

    def step(self, plan: StepPlan, planned: list[Planned]) -> None:
        """Stores the tokens of a step; fails if a span finds other tokens in its blocks than those before it."""
        owners = np.repeat([chunk.sequence.arrival for chunk in planned], plan.span_length)
        self.slots[plan.slots] = np.stack([owners, plan.positions], axis=1)
        for chunk, table, context in zip(planned, plan.block_tables, plan.span_context.tolist(), strict=True):
            positions = np.arange(context)
            found = self.slots[table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE]
            assert (found[:, 0] == chunk.sequence.arrival).all(), "a block was used again while a step needed it"
            assert (found[:, 1] == positions).all()


class Traffic:
    """Random requests, cancels and preemptions over one persistent batch; every plan is compared.

    Args:
        seed: the seed of all choices.
        ahead: the number of steps that are planned before the results of a step are known.
        speculate: the largest number of proposals; a step with some is not followed before its results are known.
    """

    def __init__(self, seed: int, ahead: int, speculate: int) -> None:
        self.random = random.Random(seed)
        self.ahead, self.speculate = ahead, speculate
        self.scheduler = Scheduler(Limits(5, 99, 12, 64), NUM_BLOCKS, BLOCK_SIZE)
        self.cache = SimulatedCache(NUM_BLOCKS)
        self.writer = BatchWriter(5, lambda sequence: STOPPING)
        self.batch = PersistentBatch(BLOCK_SIZE)
        self.live: list[Sequence] = []
        self.seen: Counter[str] = Counter()

    def arrive(self, number: int) -> None:
        choose = self.random.choice
        params = SamplingParams(
            temperature=choose([0.0, 0.7]),
            top_k=choose([0, 5]),
            top_p=choose([1.0, 0.9]),
            min_p=choose([0.0, 0.1]),
            logprobs=choose([None, 2]),
        )
        if number // 100 % 2:  # in between there is traffic without bias and counts
            params = replace(
                params,
                repetition_penalty=choose([1.0, 1.0, 1.3]),
                presence_penalty=choose([0.0, 0.0, 0.5]),
                frequency_penalty=choose([0.0, 0.0, 0.2]),
                min_new_tokens=choose([0, 0, 3]),
                logit_bias=choose([{}, {}, {3: 1.5, 7: -2.0}]),
            )
        prompt = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 14))]
        longest = len(prompt) + self.random.randint(1, 28)
        sequence = Sequence(str(number), number % 3, number, params, 2**64 - 1 - number, prompt, longest)
        sequence.root = sequence.request_id.encode()  # slots have one owner: nothing is shared
        sequence.priority, sequence.principal = choose([0, 0, 1]), choose("aab")
        if self.random.random() < 0.3:
            sequence.matcher = cast(Matcher, object())  # the batch only asks whether there is one
            sequence.is_asked = choose([False, True])
        elif self.speculate:
            sequence.speculation = Speculation(self.speculate)
        sequence.deadline = number + choose([3, 40]) if self.random.random() < 0.2 else None
        self.live.append(sequence)
        self.scheduler.add([sequence])

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.writer.release(sequence)
        self.live.remove(sequence)
        self.seen["preempted"] += sequence.preemptions

    def scored(self, chunks: list[ScheduledChunk]) -> list[SamplingRow]:
        """Returns rows for some tokens of the longer chunks."""
        rows, first = [], 0
        for chunk in chunks:
            places = range(chunk.stop - chunk.start - 1)
            rows += [SamplingRow(first + i, i, i % 3) for i in places if self.random.random() < 0.2]
            first += chunk.length
        return rows

    def run(self, steps: int) -> None:
        flights: list[tuple[bytes, list[Planned], list[SamplingRow]]] = []
        for number in range(steps):
            while any(chunk.proposals for _, planned, _ in flights for chunk in planned):
                self.compute(*flights.pop(0))
            if self.random.random() < 0.35:
                self.arrive(number)
            if self.live and self.random.random() < 0.05:
                self.end(self.random.choice(self.live))
                self.seen["cancelled"] += 1
            for sequence in self.scheduler.expire(number):
                self.end(sequence)
                self.seen["expired"] += 1
            scheduled = self.scheduler.schedule()
            chunks = [chunk for chunk in scheduled if self.writer.can_write(chunk)]
            self.seen["left out"] += len(scheduled) - len(chunks)
            if chunks:
                self.scheduler.observe(chunks, 0.2)  # long enough for the quanta of principals to pass
                scored = self.scored(chunks)
                flights.append(
                    (self.writer.write(chunks, scored, asks=True).encode(), list(map(Planned.of, chunks)), scored)
                )
                for chunk, planned in zip(chunks, flights[-1][1], strict=True):
                    self.scheduler.advance(chunk)
                    if planned.samples:
                        chunk.sequence.append(UNKNOWN)
            while len(flights) > (self.ahead if chunks else 0):
                self.compute(*flights.pop(0))
            self.scheduler.check_integrity()

    def compute(self, message: bytes, planned: list[Planned], scored: list[SamplingRow]) -> None:
        decoded = decode_message(message)
        if isinstance(decoded, NextTokens):
            self.seen["went on"] += 1
            self.seen["new blocks"] += len(decoded.blocks)
        plan = self.batch.plan(decoded)
        assert_same(plan, full_plan(planned, BLOCK_SIZE, STOPPING, scored))
        self.seen["masked"] += plan.rows.are_masked
        self.seen["asked"] += plan.rows.are_asked
        self.cache.step(plan, planned)
        sampling = [chunk for chunk in planned if chunk.samples]
        tokens = [
            next_token([*chunk.sequence.tokens(0, chunk.stop), *chunk.proposals[:i]])
            for chunk in sampling
            for i in range(len(chunk.proposals) + 1)
        ]
        results = np.zeros(len(plan.rows), np.int32)
        results[plan.rows.target == SAMPLE] = tokens
        self.batch.feed(results)
        for chunk in sampling:
            self.take(chunk, [tokens.pop(0) for _ in range(len(chunk.proposals) + 1)])
        self.seen["steps"] += 1
        self.seen["scored"] += len(scored)

    def take(self, chunk: Planned, tokens: list[int]) -> None:
        """Gives a sequence the tokens that were chosen after its last token and after its proposals."""
        sequence = chunk.sequence
        for i, token in enumerate(tokens):
            stop = chunk.stop + i
            if i and (sequence.status is Status.FINISHED or sequence.output[-1] != chunk.proposals[i - 1]):
                self.seen["rejected"] += 1
                return
            if i:
                self.scheduler.accept(sequence)
                self.seen["accepted"] += 1
            sequence.output[stop - sequence.num_prompt] = token
            if sequence.status is not Status.FINISHED and (token == 4 or stop + 1 == sequence.max_tokens):
                self.seen["computed in vain"] += sequence.num_tokens > stop + 1
                self.end(sequence)


@pytest.mark.parametrize(
    ("ahead", "speculate"),
    [
        (1, 3),
        pytest.param(1, 0, marks=pytest.mark.matrix),
        pytest.param(0, 0, marks=pytest.mark.matrix),
        pytest.param(0, 5, marks=pytest.mark.matrix),
    ],
)
def test_random_traffic_gives_the_plans_without_a_persistent_batch(ahead: int, speculate: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        traffic = Traffic(seed, ahead, speculate)
        traffic.run(400)
        seen += traffic.seen
    assert seen["steps"] > 1000
    assert min(seen[name] for name in ("preempted", "cancelled", "expired", "scored", "masked", "asked")) > 5
    assert bool(seen["computed in vain"]) == bool(seen["left out"]) == bool(ahead)
    assert (min(seen["accepted"], seen["rejected"]) > 20) == (speculate > 0)
    assert (min(seen["went on"], seen["new blocks"]) > 20) == bool(ahead)


def test_slots_and_tables_grow() -> None:
    scheduler = Scheduler(Limits(70, 99, 40000, 40000), num_blocks=3000, block_size=16)
    writer, batch = BatchWriter(70, lambda sequence: ()), PersistentBatch(16)
    for number in range(70):
        prompt = [5] * (30000 if number == 40 else 20)
        scheduler.add([Sequence(str(number), 0, number, SamplingParams(), 0, prompt, len(prompt) + 9)])
    widths = []
    for _ in range(4):
        chunks = scheduler.schedule()
        planned = [Planned.of(chunk) for chunk in chunks]
        plan = batch.plan(decode_message(writer.write(chunks).encode()))
        assert_same(plan, full_plan(planned, 16))
        batch.feed(np.full(len(plan.rows), 9, np.int32))
        for chunk in chunks:
            scheduler.advance(chunk)
            chunk.sequence.append(9)
        widths.append(plan.block_tables.shape)
    assert widths[-1] == (70, 1876)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_decode_step_sends_only_the_changes(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    scheduler = Scheduler(Limits(8, 99, 40000, 40000), num_blocks=9000, block_size=16)
    writer, batch = BatchWriter(8, lambda sequence: ()), PersistentBatch(16)
    for number in range(8):
        scheduler.add([Sequence(str(number), 0, number, params, 0, range(number, number + 4999), 5100)])
    lengths = []
    for _ in range(3):
        chunks = scheduler.schedule()
        message = writer.write(chunks).encode()
        lengths.append(len(message))
        batch.plan(decode_message(message))
        batch.feed(np.full(8, 9, np.int32))
        for chunk in chunks:
            scheduler.advance(chunk)
            chunk.sequence.append(UNKNOWN)
    assert lengths[0] > 8 * 4999 * 4, "the prompts"
    assert lengths[1] <= 300, "a decode step has 8 numbers for each sequence"
    assert (lengths[2] == 4) == (penalty == 1), "sequences go on by the tokens that they sampled"


def test_a_block_takes_the_place_of_a_shared_one() -> None:
    writer, batch = BatchWriter(2, lambda sequence: ()), PersistentBatch(16)
    sequence = Sequence("", 1, 0, SamplingParams(), 0, range(20), 40, output=[5], num_computed=20, blocks=[3, 8])
    batch.plan(decode_message(writer.write([ScheduledChunk(sequence, 19, 1)]).encode()))
    sequence.blocks[1], sequence.fork = 6, (1, 8, 6)
    plan = batch.plan(decode_message(writer.write([ScheduledChunk(sequence, 20, 1)]).encode()))
    assert plan.block_tables.tolist() == [[3, 6]]
    assert (plan.slots.tolist(), plan.forks.tolist()) == ([6 * 16 + 4], [[8, 6]])
