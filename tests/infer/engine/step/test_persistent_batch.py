"""The persistent batch: random traffic gives, step by step, the plans that are read anew from all samples."""

import random
from collections import Counter
from dataclasses import fields, replace
from typing import cast

import numpy as np
import pytest

from tk.infer.engine.grammar.grammar import Matcher
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.batch_writer import BatchWriter
from tk.infer.engine.schedule.samples.proposer import Proposer
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample, ScheduledChunk, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.step.persistent_batch import PersistentBatch
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampling_rows import SAMPLE, SamplingRows, ScoredRow
from tk.infer.engine.step.step_message import NEXT_TOKENS, GivenTokens, NextTokens, decode_message
from tk.tests.infer.engine.schedule.new_sample import new_sample
from tk.tests.infer.full_plan import Planned, full_plan

STOPPING = (3, 4)
BLOCK_SIZE, NUM_BLOCKS = 4, 11
VOCAB = 11


def assert_same(found: RunningPlan, expected: RunningPlan) -> None:
    """Fails if two plans differ in the values or the type of an array."""
    names = {f.name for f in fields(RunningPlan)} - {"rows", "generation"}
    pairs = [(name, getattr(found, name), getattr(expected, name)) for name in sorted(names)]
    pairs += [(f.name, getattr(found.rows, f.name), getattr(expected.rows, f.name)) for f in fields(SamplingRows)]
    for name, one, two in pairs:
        assert one.dtype == two.dtype, name
        assert one.shape == two.shape, name
        assert np.array_equal(one, two), f"{name}: {one} is not {two}"


def next_token(tokens: list[int]) -> int:
    """Returns the token that a deterministic model chooses after these; it repeats itself for a while."""
    return hash((len(tokens) // 20, *tokens[-2:])) % VOCAB


class SimulatedCache:
    """A cache that remembers the sample and position of every token, and checks the tokens that attention reads."""

    def __init__(self, num_blocks: int) -> None:
        self.slots = np.full(((num_blocks + 1) * BLOCK_SIZE, 2), -1)

    def step(self, plan: RunningPlan, planned: list[Planned]) -> None:
        """Stores the tokens of a step; fails if a span finds other tokens in its blocks than those before it."""
        owners = np.repeat([chunk.sample.arrival for chunk in planned], plan.span_length)
        self.slots[plan.slots] = np.stack([owners, plan.positions], axis=1)
        for chunk, table, context in zip(planned, plan.block_tables, plan.span_context.tolist(), strict=True):
            positions = np.arange(context)
            found = self.slots[table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE]
            assert (found[:, 0] == chunk.sample.arrival).all(), "a block was used again while a step needed it"
            assert (found[:, 1] == positions).all()


class Forcing:
    """A matcher that forces some tokens now and then; with `most` 0 it never does."""

    def __init__(self, choices: random.Random, most: int) -> None:
        self.random, self.most = choices, most

    def forced_chain(self, most: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(self.random.randint(0, min(self.most, most)))]


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
        self.writer = BatchWriter(5)
        self.batch = PersistentBatch(BLOCK_SIZE)
        self.live: list[Sample] = []
        self.seen: Counter[str] = Counter()
        self.has_left = False  # the plan of the last step

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
        sample = new_sample(
            number,
            prompt,
            longest,
            params,
            index=number % 3,
        )
        sample.seed = 2**64 - 1 - number
        sample.output.stopping = frozenset(STOPPING)
        sample.table.root = sample.request.request_id.encode()  # slots have one owner: nothing is shared
        sample.request = replace(sample.request, priority=choose([0, 0, 1]), principal=choose("aab"))
        if self.random.random() < 0.3:
            sample.output.matcher = cast(Matcher, Forcing(self.random, self.speculate))
            sample.output.has_candidates = choose([False, True])
        elif self.speculate:
            sample.proposer = Proposer(self.speculate)
        if self.random.random() < 0.2:
            sample.request = replace(sample.request, deadline=number + choose([3, 40]))
        self.live.append(sample)
        self.scheduler.add([sample])

    def end(self, sample: Sample) -> None:
        self.scheduler.finish(sample)
        self.writer.release(sample)
        self.live.remove(sample)
        self.seen["preempted"] += sample.preemptions

    def scored(self, chunks: list[ScheduledChunk]) -> list[ScoredRow]:
        """Returns rows for some tokens of the longer chunks."""
        rows, first = [], 0
        for chunk in chunks:
            places = range(chunk.stop - chunk.start - 1)
            rows += [ScoredRow(first + i, i, i % 3) for i in places if self.random.random() < 0.2]
            first += chunk.length
        return rows

    def run(self, steps: int) -> None:
        flights: list[tuple[bytes, list[Planned], list[ScoredRow]]] = []
        for number in range(steps):
            while any(chunk.proposals for _, planned, _ in flights for chunk in planned):
                self.compute(*flights.pop(0))
            if self.random.random() < 0.35:
                self.arrive(number)
            if self.live and self.random.random() < 0.05:
                self.end(self.random.choice(self.live))
                self.seen["cancelled"] += 1
            for sample in self.scheduler.expire(number):
                self.end(sample)
                self.seen["expired"] += 1
            scheduled = self.scheduler.schedule()
            chunks = [chunk for chunk in scheduled if self.writer.can_write(chunk)]
            self.seen["left out"] += len(scheduled) - len(chunks)
            if chunks:
                self.scheduler.observe(chunks, 0.2)  # long enough for the quanta of principals to pass
                scored = self.scored(chunks)
                message = self.writer.write(chunks, scored, with_candidates=True).encode()
                flights.append((message, list(map(Planned.of, chunks)), scored))
                for chunk, planned in zip(chunks, flights[-1][1], strict=True):
                    self.scheduler.advance(chunk)
                    if planned.samples:
                        chunk.sample.output.tokens.append(UNKNOWN)
            while len(flights) > (self.ahead if chunks else 0):
                self.compute(*flights.pop(0))
            self.scheduler.check_integrity()

    def compute(self, message: bytes, planned: list[Planned], scored: list[ScoredRow]) -> None:
        decoded = decode_message(message)
        if isinstance(decoded, NextTokens):
            self.seen["went on"] += 1
            self.seen["followed"] += self.has_left
            self.seen["new blocks"] += len(decoded.blocks)
            if self.seen["new blocks"] % 2:  # as a backend that took the message by itself
                self.batch.extend(decoded.blocks)
                decoded = NEXT_TOKENS
        plan = self.batch.plan(decoded)
        assert_same(plan, full_plan(planned, BLOCK_SIZE, STOPPING, scored))
        self.seen["masked"] += plan.rows.are_masked
        self.seen["asked"] += plan.rows.have_candidates
        self.cache.step(plan, planned)
        sampling = [chunk for chunk in planned if chunk.samples]
        tokens = [
            next_token([*chunk.sample.tokens(0, chunk.stop), *chunk.proposals[:i]])
            for chunk in sampling
            for i in range(chunk.num_sure, len(chunk.proposals) + 1)
        ]
        results = np.zeros(len(plan.rows), np.int32)
        results[plan.rows.target == SAMPLE] = tokens
        self.has_left = isinstance(decoded, GivenTokens) and self.random.random() < 0.5
        if self.has_left:  # as a backend that took the message by itself
            rows = (plan.positions, plan.rows.new_number, results) if plan.can_advance else (results[:0],) * 3
            self.batch.leave(np.stack(rows, axis=1))
        else:
            self.batch.feed(results)
        for chunk in sampling:
            sampled = [tokens.pop(0) for _ in range(chunk.num_sure, len(chunk.proposals) + 1)]
            self.take(chunk, [*chunk.proposals[: chunk.num_sure], *sampled])
        self.seen["steps"] += 1
        self.seen["scored"] += len(scored)

    def take(self, chunk: Planned, tokens: list[int]) -> None:
        """Gives a sample the tokens that were chosen after its last token and after its proposals."""
        sample = chunk.sample
        for i, token in enumerate(tokens):
            stop = chunk.stop + i
            if i and (sample.status is Status.FINISHED or sample.output.tokens[-1] != chunk.proposals[i - 1]):
                self.seen["rejected"] += 1
                return
            if i:
                self.scheduler.accept(sample)
                self.seen["accepted"] += 1
            sample.output.tokens[stop - sample.num_prompt] = token
            if sample.status is not Status.FINISHED and (token == 4 or stop + 1 == sample.output.max_tokens):
                self.seen["computed in vain"] += sample.num_tokens > stop + 1
                self.end(sample)


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
    assert (seen["followed"] > 5) == bool(ahead)


def test_slots_and_tables_grow() -> None:
    scheduler = Scheduler(Limits(70, 99, 40000, 40000), num_blocks=3000, block_size=16)
    writer, batch = BatchWriter(70), PersistentBatch(16)
    for number in range(70):
        prompt = [5] * (30000 if number == 40 else 20)
        scheduler.add([new_sample(number, prompt, len(prompt) + 9)])
    widths = []
    for _ in range(4):
        chunks = scheduler.schedule()
        planned = [Planned.of(chunk) for chunk in chunks]
        plan = batch.plan(decode_message(writer.write(chunks).encode()))
        assert_same(plan, full_plan(planned, 16))
        batch.feed(np.full(len(plan.rows), 9, np.int32))
        for chunk in chunks:
            scheduler.advance(chunk)
            chunk.sample.output.tokens.append(9)
        widths.append(plan.block_tables.shape)
    assert widths[-1] == (70, 1876)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_decode_step_sends_only_the_changes(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    scheduler = Scheduler(Limits(8, 99, 40000, 40000), num_blocks=9000, block_size=16)
    writer, batch = BatchWriter(8), PersistentBatch(16)
    for number in range(8):
        scheduler.add([new_sample(number, range(number, number + 4999), 5100, params)])
    lengths = []
    for _ in range(3):
        chunks = scheduler.schedule()
        message = writer.write(chunks).encode()
        lengths.append(len(message))
        batch.plan(decode_message(message))
        batch.feed(np.full(8, 9, np.int32))
        for chunk in chunks:
            scheduler.advance(chunk)
            chunk.sample.output.tokens.append(UNKNOWN)
    assert lengths[0] > 8 * 4999 * 4, "the prompts"
    assert lengths[1] <= 300, "a decode step has 8 numbers for each sequence"
    assert (lengths[2] == 4) == (penalty == 1), "sequences go on by the tokens that they sampled"


def test_a_block_takes_the_place_of_a_shared_one() -> None:
    writer, batch = BatchWriter(2), PersistentBatch(16)
    sample = new_sample(0, range(20), 40, index=1)
    sample.output.tokens, sample.table.blocks, sample.num_computed = [5], [3, 8], 20
    batch.plan(decode_message(writer.write([ScheduledChunk(sample, 19, 1)]).encode()))
    sample.table.blocks[1], sample.table.fork = 6, (1, 8, 6)
    plan = batch.plan(decode_message(writer.write([ScheduledChunk(sample, 20, 1)]).encode()))
    assert plan.block_tables.tolist() == [[3, 6]]
    assert (plan.slots.tolist(), plan.forks.tolist()) == ([6 * 16 + 4], [[8, 6]])


def test_tables_get_the_blocks_of_several_steps_at_once() -> None:
    writer, batch = BatchWriter(2), PersistentBatch(4)
    chunks = []
    for number in range(2):
        sample = new_sample(number, range(3), 40)
        sample.table.blocks = [number + 1]
        chunks.append(ScheduledChunk(sample, 2, 1))
    plan = batch.plan(decode_message(writer.write(chunks[::-1]).encode()))
    batch.feed(np.array([8, 9], np.int32))
    generation = plan.generation
    batch.extend(np.array([[1, 7], [0, 5], [1, 6], [0, 4], [1, 3]], np.int32))
    assert plan.block_tables.tolist() == [[2, 5, 4, 0], [1, 7, 6, 3]]
    assert plan.generation == generation
    batch.extend(np.empty((0, 2), np.int32))
    assert plan.block_tables.tolist() == [[2, 5, 4, 0], [1, 7, 6, 3]]
