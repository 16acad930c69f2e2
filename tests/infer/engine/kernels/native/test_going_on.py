"""Steps that the kernels carry out alone: results and plans of steps one by one, until another message comes."""

import socket
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from tk.infer.engine.kernels.engine_line import EngineLine, WentOn
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.step.step_plan import (
    ASKED,
    NO_LOGPROBS,
    NO_MASK,
    Array,
    SamplerOutput,
    SamplingRow,
    SamplingRows,
    StepPlan,
)
from tk.tests.infer.engine.kernels.native.running import logits, runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.model.architectures import ENTRIES

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LENGTHS = (BLOCK_SIZE - 2, 5)
TABLE = np.array([[1, 2], [5, 6]], np.int32)
NEXT = b"next step"
AGAIN = b"again"
STEPS = 4


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The engine's end of a socket, and the rank's."""
    engine, rank = socket.socketpair()
    engine.settimeout(60)
    with engine, rank:
        yield engine, rank


def begin(made: NativeRunner, num_top: int = NO_LOGPROBS, mask: int = NO_MASK) -> tuple[StepPlan, SamplerOutput]:
    """Computes two prompts and a step behind them; returns its plan and its results."""
    for i, length in enumerate(LENGTHS):
        logits(made, range(3, 3 + length), (), first_block=1 + 4 * i)
    start = np.array(LENGTHS, np.int32)
    plan = StepPlan(
        tokens=np.array([7, 8], np.int32),
        positions=start.copy(),
        slots=TABLE[:, 0] * BLOCK_SIZE + start,
        span_length=np.ones(2, np.int32),
        span_context=start + 1,
        block_tables=TABLE,
        rows=SamplingRows.pack([SamplingRow(i, temperature=1.0, seed=i, num_top=num_top, mask=mask) for i in range(2)]),
    )
    return plan, made.step(plan)


def advance(plan: StepPlan, sampled: Array) -> None:
    """Moves a plan on by the tokens that were sampled."""
    plan.tokens[:] = sampled
    for counted in (plan.positions, plan.span_context, plan.rows.new_number):
        counted += 1
    plan.slots[:] = TABLE[[0, 1], plan.positions // BLOCK_SIZE] * BLOCK_SIZE + plan.positions % BLOCK_SIZE


def encode(output: SamplerOutput) -> bytes:
    """Returns results behind a header."""
    return b"results" + output.encode()


def encode_tokens(tokens: Array) -> bytes:
    """Returns chosen tokens behind a header."""
    return b"tokens" + tokens.tobytes()


def line_of(rank: socket.socket, answers: bool = True) -> EngineLine:
    return EngineLine(rank.fileno(), NEXT, encode, encode_tokens, AGAIN, answers)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int4"])
def test_steps_are_those_that_come_one_by_one(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], kv_dtype: str
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    alone, guided = (runner(tmp_path, kv_dtype=kv_dtype, threads=threads) for threads in (2, 1))
    plan, output = begin(alone)
    expected, first = begin(guided)
    assert output.encode() == first.encode()
    engine.sendall(NEXT * STEPS + b"next slot")
    last = alone.go_on(line_of(rank))
    assert last is not None
    assert last.tokens is not None
    assert not last.has_next
    tokens = first.token_ids
    for _ in range(STEPS):
        advance(expected, tokens)
        one = guided.step(expected)
        tokens = one.token_ids
        answer = encode(one)
        assert engine.recv(len(answer), socket.MSG_WAITALL) == answer
    assert last.tokens.tolist() == tokens.tolist()
    assert rank.recv(100) == b"next slot", "a message that says anything else stays where it is"
    advance(expected, tokens)
    tokens_of_plan = plan.tokens.copy()
    advance(plan, last.tokens)
    assert tokens_of_plan.tolist() != plan.tokens.tolist()
    for name in ("tokens", "positions", "slots", "span_context"):
        assert getattr(plan, name).tolist() == getattr(expected, name).tolist(), name
    assert plan.rows.new_number.tolist() == expected.rows.new_number.tolist()
    assert alone.step(plan).encode() == guided.step(expected).encode()
    alone.close()
    guided.close()


def test_the_engine_chooses_tokens_among_candidates(tmp_path: Path, ends: tuple[socket.socket, socket.socket]) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    alone, guided = (runner(tmp_path, threads=threads) for threads in (2, 1))
    plan, output = begin(alone, mask=ASKED)
    expected, first = begin(guided, mask=ASKED)
    assert (first.candidates >= 0).all()
    assert output.encode() == first.encode()
    chosen, answers = first.candidates[[0, 1], [3, 0]], []
    for _ in range(STEPS):
        engine.sendall(NEXT + encode_tokens(chosen))
        advance(expected, chosen)
        answers.append(guided.step(expected))
        chosen = answers[-1].candidates[[0, 1], [0, 5]]
    engine.sendall(NEXT + b"other")
    assert alone.go_on(line_of(rank)) == WentOn(None, has_next=True)
    for answer in map(encode, answers):
        assert engine.recv(len(answer), socket.MSG_WAITALL) == answer
    assert rank.recv(100) == b"other", "a message that says anything else stays where it is"
    mask = np.zeros((1, 4), np.uint32)
    mask[0, 2] = 1 << 5
    for made in (alone, guided):
        assert made.sample_again(mask, np.array([1], np.int32)).token_ids[1] == 2 * 32 + 5
    for each in (plan, expected):
        advance(each, chosen)
    assert plan.tokens.tolist() == expected.tokens.tolist()
    assert alone.step(plan).encode() == guided.step(expected).encode()
    engine.sendall(NEXT)
    engine.close()
    assert alone.go_on(line_of(rank)) == WentOn(None, has_next=True), "the engine has ended"
    alone.close()
    guided.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_sampled_again_with_masks(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], threads: int
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    alone, guided = runner(tmp_path, threads=threads), runner(tmp_path)
    begin(alone, mask=ASKED)
    expected, first = begin(guided, mask=ASKED)
    chosen = first.candidates[:, 0]
    for _ in range(STEPS):
        sent = []
        for rows in ([1], [0, 1]):
            masks = np.zeros((len(rows), 4), np.uint32)
            masks[:, 2] = 1 << np.array([5, 9][: len(rows)])
            body = np.array(masks.shape, np.int32).tobytes() + masks.tobytes() + np.array(rows, np.int32).tobytes()
            engine.sendall((NEXT if rows == [1] else b"") + AGAIN + np.uint32(len(body)).tobytes() + body)
            sent.append(guided.sample_again(masks, np.array(rows, np.int32)))
        assert [each.token_ids.tolist()[1] for each in sent] == [69, 73]
        chosen = sent[-1].token_ids
        engine.sendall(encode_tokens(chosen))
        assert alone.go_on(line_of(rank)) == WentOn(None, has_next=False)
        advance(expected, chosen)
        step = guided.step(expected)
        answers = [SamplerOutput.decode(engine.recv(len(encode(step)), socket.MSG_WAITALL)[7:]) for _ in range(3)]
        assert answers[0].token_ids[1] == 69
        assert answers[0].candidates[0].tolist() == first.candidates[0].tolist(), "a row without a mask is as before"
        assert answers[1].token_ids.tolist() == chosen.tolist() == [69, 73]
        assert answers[2].encode() == step.encode()
        first = step
    alone.close()
    guided.close()


def test_a_rank_that_does_not_answer_sends_nothing(tmp_path: Path, ends: tuple[socket.socket, socket.socket]) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made = runner(tmp_path)
    begin(made)
    engine.sendall(NEXT)
    assert made.go_on(line_of(rank, answers=False)) is not None
    engine.setblocking(False)
    with pytest.raises(BlockingIOError):
        engine.recv(1)
    made.close()


@pytest.mark.parametrize("message", [b"", NEXT[:-1], b"other step"])
def test_without_the_message_there_is_no_step(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], message: bytes
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made = runner(tmp_path)
    plan, _ = begin(made)
    before = deepcopy(plan)
    engine.sendall(message)
    assert made.go_on(line_of(rank)) is None
    assert plan.positions.tolist() == before.positions.tolist()
    engine.close()
    assert rank.recv(100) == message
    made.close()


def test_log_probabilities_and_prompts_are_left_to_the_worker(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made = runner(tmp_path)
    line = line_of(rank)
    engine.sendall(NEXT)
    assert made.go_on(line) is None, "there was no step before"
    begin(made, num_top=0)
    assert made.go_on(line) is None
    plan, _ = begin(made)
    several = StepPlan(
        tokens=np.array([3, 4, 5], np.int32),
        positions=np.arange(3, dtype=np.int32),
        slots=BLOCK_SIZE + np.arange(3, dtype=np.int32),
        span_length=np.array([3], np.int32),
        span_context=np.array([3], np.int32),
        block_tables=TABLE[:1],
        rows=plan.rows.part(0, 1),
    )
    made.step(several)
    assert made.go_on(line) is None
    assert rank.recv(100) == NEXT
    made.close()
