"""A draft proposes what it chooses after a sample's tokens, whatever of its cache is right: the keys are checked."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tk.infer.engine.job import Job
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.block_manager import BlockManager
from tk.infer.engine.schedule.live_request import LiveRequest
from tk.infer.engine.schedule.proposing.draft_policy import DraftPolicy
from tk.infer.engine.schedule.proposing.proposals import ProposalPolicy
from tk.infer.engine.schedule.samples.draft_record import DraftRecord
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample, ScheduledChunk, Source, Status
from tk.infer.engine.step.persistent_batch import PersistentBatch
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.step_message import decode_message
from tk.infer.engine.worker.draft_model import DraftModel
from tk.infer.engine.worker.worker_group import WorkerGroup
from tk.tests.infer.engine.schedule.new_sample import new_sample

BLOCK = 4


def next_token(tokens: list[int]) -> int:
    """Returns the token that the draft chooses after these."""
    return (sum(tokens) * 7 + len(tokens)) % 97


class Worker:
    """A worker whose cache holds tokens for keys: it chooses by the tokens that it finds there."""

    def __init__(self) -> None:
        self.watch = SimpleNamespace(begin=lambda predict: None, rest=lambda: None)
        self.batch, self.results = PersistentBatch(BLOCK), deque[SamplerOutput]()
        self.cache: dict[int, int] = {}
        self.steps: list[int] = []  # the tokens of each
        self.counted: list[int] = []

    def send(self, message: bytes) -> None:
        plan = self.batch.plan(decode_message(message))
        self.cache |= dict(zip(plan.slots.tolist(), plan.tokens.tolist(), strict=True))
        self.steps.append(len(plan.tokens))
        self.counted.append(int(plan.rows.count_value.sum()))
        ends = np.cumsum(plan.span_length)
        chosen = []
        for row in plan.rows.token.tolist():
            table = plan.block_tables[np.searchsorted(ends, row, side="right")]
            places = [int(table[i // BLOCK]) * BLOCK + i % BLOCK for i in range(int(plan.positions[row]) + 1)]
            chosen.append(next_token([self.cache.get(place, -1000) for place in places]))
        self.batch.feed(np.array(chosen, np.int32))
        self.results.append(SamplerOutput.of_tokens(np.array(chosen, np.int32), np.ones(len(chosen), np.uint8)))

    def receive(self) -> SamplerOutput:
        return self.results.popleft()


class World:
    """Samples with their blocks, and their draft."""

    def __init__(self, max_tokens: int = 64) -> None:
        self.blocks, self.worker = BlockManager(40, BLOCK), Worker()
        job = Job("", "", "", "", 40, 0, BLOCK, max_tokens)
        self.policy = DraftPolicy(8, 1000, ProposalPolicy())
        workers = cast(WorkerGroup, self.worker)
        self.draft = DraftModel(workers, job, self.policy, self.blocks.allocator, 3)

    def begin(self, number: int, prompt: list[int], params: SamplingParams | None = None) -> Sample:
        sample = new_sample(number, prompt, 200, params or SamplingParams())
        sample.output.draft = DraftRecord()
        self.admit(sample)
        sample.output.tokens = [sum(prompt) % 97]
        return sample

    def admit(self, sample: Sample) -> None:
        assert self.blocks.admit(sample, 0)
        sample.status, sample.num_computed = Status.RUNNING, sample.num_tokens
        self.blocks.publish(sample)

    def propose(self, *wanted: tuple[Sample, int]) -> list[list[int]]:
        planned = list[tuple[ScheduledChunk, LiveRequest]]()
        for sample, count in wanted:
            self.blocks.grow(sample, count)
            room = (UNKNOWN,) * count
            chunk = ScheduledChunk(sample, sample.num_tokens - 1, 1 + count, room, Source.DRAFT)
            planned.append((chunk, cast(Any, None)))
        filled = [chunk for chunk, _ in self.draft.fill(planned)]
        assert all(chunk.length == 1 + len(chunk.proposals) and chunk.is_last for chunk in filled)
        return [list(chunk.proposals) for chunk in filled]


def expected(sample: Sample, count: int) -> list[int]:
    tokens = sample.tokens(0, sample.num_tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(tokens) - count :]


def test_it_goes_on_behind_the_tokens_that_came_true() -> None:
    world = World()
    sample = world.begin(0, [1, 2, 3, 4, 5, 6])
    for num_right in (0, 2, 4, 1, 3, 4, 4, 0):
        [made] = world.propose((sample, 4))
        assert made == expected(sample, 4)
        sample.output.tokens += [*made[:num_right], 90]
    assert world.worker.steps[:4] == [7, 1, 1, 1]
    assert max(world.worker.steps[4:]) == 2, "the last token, and at most one proposal whose key it lacked"


def test_samples_have_their_own_numbers_of_proposals() -> None:
    world = World()
    one, two, three = (world.begin(i, [i + 1] * (3 + i)) for i in range(3))
    for _ in range(3):
        made = world.propose((one, 1), (two, 4), (three, 2))
        assert made == [expected(one, 1), expected(two, 4), expected(three, 2)]
        for sample, tokens in zip((one, two, three), made, strict=True):
            sample.output.tokens += [*tokens, 91]
    two.output.tokens += [5, 6, 7]
    assert world.propose((three, 3), (two, 1)) == [expected(three, 3), expected(two, 1)]


def test_a_long_prompt_is_read_in_parts_and_proposes_nothing_before() -> None:
    world = World(max_tokens=8)
    long, short = world.begin(0, list(range(20))), world.begin(1, [7])
    seen = [world.propose((long, 2), (short, 2)) for _ in range(4)]
    assert [each[0] for each in seen] == [[], [], [], expected(long, 2)]
    assert all(each[1] == expected(short, 2) for each in seen)
    assert long.output.draft is not None
    assert long.output.draft.num_computed == 21


def test_full_blocks_with_keys_of_the_draft_are_not_computed_again() -> None:
    world = World()
    prompt = list(range(10))
    first = world.begin(0, prompt)
    world.propose((first, 3))
    second = world.begin(1, [*prompt[:8], 60])
    world.worker.steps.clear()
    assert world.propose((second, 3)) == [expected(second, 3)]
    assert world.worker.steps == [2, 1, 1], "the prompt's last token, and the new one"
    world.blocks.allocator.flush()
    third = world.begin(2, prompt)
    assert world.propose((third, 1)) == [expected(third, 1)]
    assert world.worker.steps[-1] == 11


def test_samples_that_share_a_prompt_compute_it_once() -> None:
    world = World()
    one, two = world.begin(0, list(range(9))), world.begin(1, list(range(9)))
    assert world.propose((one, 2), (two, 2)) == [expected(one, 2), []]
    assert world.propose((one, 2), (two, 2)) == [expected(one, 2), expected(two, 2)]
    assert world.worker.steps == [10, 1, 1 + 2, 2], "eight tokens of the second are in blocks of the first"


def test_a_preempted_sample_and_one_after_others_ended_begin_anew() -> None:
    world = World()
    sample = world.begin(0, list(range(6)))
    world.propose((sample, 3))
    world.blocks.release(sample, keep=False)
    sample.preemptions += 1
    other = world.begin(1, [50] * 30)  # whose tokens are where the sample's were
    world.propose((other, 3))
    world.admit(sample)
    assert world.propose((sample, 3)) == [expected(sample, 3)]
    for number in range(2, 9):
        other.status = Status.FINISHED
        world.blocks.release(other)
        other = world.begin(number, [number] * 9)
        assert world.propose((other, 3), (sample, 2)) == [expected(other, 3), expected(sample, 2)]


def test_counts_under_penalties_are_those_of_tokens_that_came_true() -> None:
    world = World()
    sample = world.begin(0, [1, 2, 3], SamplingParams(frequency_penalty=0.5))
    for _ in range(3):
        [made] = world.propose((sample, 3))
        assert made == expected(sample, 3)
        assert world.worker.counted[-3:] == [sample.num_new, sample.num_new + 1, sample.num_new + 2]
        sample.output.tokens += [made[0], 90]


class Even:
    """A constraint that allows even tokens, and after `last` tokens none."""

    def __init__(self, last: int) -> None:
        self.is_complete, self.error, self.last = last == 0, None, last

    def first_allowed(self, candidates: list[int]) -> int | None:
        return next((token for token in candidates if token % 2 == 0), None)

    def after(self, token: int) -> "Even":
        return Even(self.last - 1)


@pytest.mark.parametrize("last", [1, 99])
def test_proposals_are_cut_at_the_first_forbidden_token(last: int) -> None:
    world = World()
    sample = world.begin(0, [1, 2, 3, 4])
    sample.output.matcher = cast(Any, Even(last))
    lengths = set()
    for _ in range(12):
        tokens = expected(sample, 4)
        kept = next((i for i, token in enumerate(tokens) if token % 2), 4)
        assert world.propose((sample, 4)) == [tokens[: min(kept, last)]]
        lengths.add(kept)
        sample.output.tokens += [42]
    assert len(lengths) > 2


def test_the_time_of_its_steps_is_learned_and_reported() -> None:
    world, observed = World(), list[tuple[int, int]]()
    world.policy.observe = lambda *given: observed.append(given[:2])  # type: ignore[method-assign]
    sample = world.begin(0, [1, 2, 3, 4])
    world.propose((sample, 4))
    assert observed.pop() == (1, 3), "in the first one it read the prompt, too"
    sample.output.tokens += [42]
    world.propose((sample, 4))
    assert observed.pop() == (1, 4)
    assert world.draft.seconds > 0
    world.draft.fill([])
    assert world.draft.seconds == 0
