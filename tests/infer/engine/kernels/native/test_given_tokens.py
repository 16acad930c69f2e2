"""Steps with tokens that the engine gives, which the kernels carry out alone, are those that the worker plans."""

import random
import socket
from pathlib import Path

import numpy as np
import pytest

from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.step.channel import NEXT_STEP, Channel, Frame, result_frame
from tk.infer.engine.step.persistent_batch import PersistentBatch
from tk.infer.engine.step.sampling_rows import NO_LOGPROBS, NO_MASK, WITH_CANDIDATES
from tk.infer.engine.step.step_message import (
    NEXT_TOKENS,
    OPENED,
    GivenTokens,
    Message,
    NextTokens,
    StepMessage,
    decode_message,
)
from tk.tests.infer.engine.kernels.native.running import runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.model.architectures import ENTRIES

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LENGTHS = (BLOCK_SIZE - 2, 5)  # of the prompts


def given(*spans: tuple[int, int, int, int], tokens: list[int], blocks: tuple[tuple[int, int, int], ...] = ()) -> bytes:
    message = GivenTokens(np.array(spans, np.int32), np.array(tokens, np.int32), np.array(blocks, np.int32))
    return Frame("step", body=message.encode()).encode()


def prompts(mask: int = NO_MASK) -> StepMessage:
    """Opens a greedy sequence and one that samples among few tokens, with a block each."""
    opened = np.zeros(2, OPENED)
    opened["slot"], opened["seed"], opened["temperature"], opened["top_k"] = (1, 0), (5, 6), (0.0, 0.9), (0, 40)
    opened["top_p"], opened["repetition_penalty"], opened["num_counts"] = 1.0, 1.0, -1
    opened["num_top"], opened["adapter"] = NO_LOGPROBS, -1
    spans = [[1, 0, LENGTHS[0], LENGTHS[0], 0, 1, 1, mask], [0, 0, LENGTHS[1], LENGTHS[1], 0, 1, 1, mask]]
    tokens = np.arange(3, 3 + sum(LENGTHS), dtype=np.int32)
    return StepMessage(np.array(spans, np.int32), tokens, np.array([3, 5], np.int32), opened=opened)


class World:
    """A rank that plans its steps, one after another, and the frames of these."""

    def __init__(self, guided: NativeRunner, seed: int) -> None:
        self.guided, self.batch, self.random = guided, PersistentBatch(BLOCK_SIZE), random.Random(seed)
        self.places, self.numbers, self.blocks = list(LENGTHS), [1, 1], [1, 1]
        self.answers: list[bytes] = []
        self.step(prompts())
        self.answers.clear()

    def step(self, message: Message) -> None:
        """Computes a step as Python plans it."""
        output = self.guided.step(self.batch.plan(message))
        self.batch.feed(output.token_ids)
        self.answers.append(result_frame(output).encode())

    def give(self, lengths: list[int], all_rows: bool, is_fed: bool) -> bytes:
        """Computes a step with tokens that are given, some of which come true, and returns its frame."""
        spans, tokens, blocks = list[tuple[int, int, int, int]](), list[int](), []
        for i, length in enumerate(lengths):
            rows = length if all_rows else 1
            spans.append((self.places[i], length, self.numbers[i], rows))
            tokens += [-1 if is_fed and j == 0 else self.random.randrange(3, 90) for j in range(length)]
            came = self.random.randint(1, length)
            while self.blocks[i] * BLOCK_SIZE < self.places[i] + length:
                blocks.append((i, self.blocks[i], 10 * (i + 1) + self.blocks[i]))
                self.blocks[i] += 1
            self.places[i] += came if all_rows else length
            self.numbers[i] += came if all_rows else 1
        frame = given(*spans, tokens=tokens, blocks=tuple(blocks))
        self.step(decode_message(frame[16:]))
        return frame

    def go_on(self) -> bytes:
        """Computes the next token of each sequence as the frame without more says, and returns that."""
        entered = [(i, self.blocks[i]) for i in range(2) if self.places[i] == self.blocks[i] * BLOCK_SIZE]
        added = [(i, 10 * (i + 1) + place) for i, place in entered]
        for i in range(2):
            self.places[i], self.numbers[i] = self.places[i] + 1, self.numbers[i] + 1
            self.blocks[i] += i in dict(entered)
        message = NextTokens(np.array(added, np.int32).reshape(-1, 2))
        self.step(message)
        return Frame("step", body=message.encode()).encode()


@pytest.mark.parametrize(("kv_dtype", "seed"), [("fp32", 0), ("int4", 1), ("int8", 2)])
def test_steps_are_those_that_the_worker_plans(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], kv_dtype: str, seed: int
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    alone, guided = (runner(tmp_path, kv_dtype=kv_dtype, threads=threads) for threads in (2, 1))
    world, batch = World(guided, seed), PersistentBatch(BLOCK_SIZE)
    frames = [world.give([1, 1], True, is_fed=True)]
    for _ in range(12):
        frames.append(world.give([world.random.randint(1, 5) for _ in range(2)], world.random.random() < 0.5, False))
        if world.random.random() < 0.5:
            frames += [world.give([1, 1], True, is_fed=False), world.go_on(), world.go_on()]
    frames += [world.give([2, 1], False, is_fed=False), world.give([1, 3], True, is_fed=True)]
    frames += [world.give([1, 1], True, is_fed=False), world.go_on()]
    engine.sendall(b"".join(frames))
    plan = batch.plan(prompts())
    batch.feed(alone.step(plan).token_ids)
    ahead = alone.decode_ahead(plan, Channel(rank, answers=True))
    assert ahead is not None
    for answer in world.answers:
        assert engine.recv(len(answer), socket.MSG_WAITALL) == answer
    assert ahead.newest is not None
    assert ahead.newest[:, 0].tolist() == [place - 1 for place in world.places]
    batch.extend(ahead.new_blocks)
    batch.leave(ahead.newest)
    world.answers.clear()
    world.go_on()
    assert result_frame(alone.step(batch.plan(NEXT_TOKENS))).encode() == world.answers[0], "the worker goes on there"
    alone.close()
    guided.close()


PLAIN = (LENGTHS[0], 1, 1, 1), (LENGTHS[1], 1, 1, 1)


@pytest.mark.parametrize(
    ("mask", "before", "frame"),
    [
        (WITH_CANDIDATES, b"", given(*PLAIN, tokens=[5, 6])),
        (NO_MASK, b"", given(PLAIN[0], tokens=[5])),
        (NO_MASK, b"", given(PLAIN[0], (5, 70, 1, 70), tokens=[5] * 71)),
        (NO_MASK, b"", given(*PLAIN, tokens=[5, 6], blocks=((0, 17, 9),))),
        (NO_MASK, given(PLAIN[0], (5, 2, 1, 2), tokens=[5, 6, 7]), given(*PLAIN, tokens=[-1, 6])),
        (NO_MASK, given(PLAIN[0], (5, 2, 1, 2), tokens=[5, 6, 7]), NEXT_STEP),
        (NO_MASK, b"", NEXT_STEP),
        (NO_MASK, b"", Frame("step", body=prompts().encode()).encode()),
        (NO_MASK, b"", Frame("adapter", {"number": 3}).encode()),
    ],
    ids=["candidates", "spans", "rows", "room", "unknown", "next after rows", "next after a prompt", "other", "kind"],
)
def test_what_the_kernels_cannot_do_stays_for_the_worker(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], mask: int, before: bytes, frame: bytes
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made, batch = runner(tmp_path), PersistentBatch(BLOCK_SIZE)
    plan = batch.plan(prompts(mask))
    made.step(plan)
    engine.sendall(before + frame)
    ahead = made.decode_ahead(plan, Channel(rank, answers=True, waits=True))
    assert rank.recv(1000) == frame
    if before:
        assert ahead is not None
        assert ahead.newest is not None
        assert ahead.newest.shape == (0, 3), "the engine gives the tokens that follow"
    else:
        assert ahead is None or ahead.tokens is None
    made.close()


def test_the_kernels_wait_for_the_engine_until_it_ends(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made, batch = runner(tmp_path), PersistentBatch(BLOCK_SIZE)
    plan = batch.plan(prompts())
    made.step(plan)
    engine.sendall(given(*PLAIN, tokens=[5, 6]))
    engine.shutdown(socket.SHUT_WR)
    ahead = made.decode_ahead(plan, Channel(rank, answers=True, waits=True))
    assert ahead is not None
    assert ahead.newest is not None
    assert ahead.newest[:, :2].tolist() == [[LENGTHS[0], 1], [LENGTHS[1], 1]]
    made.close()
