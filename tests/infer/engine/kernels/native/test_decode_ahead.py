"""Steps that the kernels carry out alone: results and plans of steps one by one, until another message comes."""

import socket
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.infer.engine.kernels.backend import DecodedAhead
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.step.channel import NEXT_STEP, Channel, Frame, masks_frame, result_frame, tokens_frame
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.sampling_rows import NO_LOGPROBS, NO_MASK, WITH_CANDIDATES
from tk.infer.engine.step.step_message import NextTokens
from tk.tests.infer.engine.kernels.native.running import logits, runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LENGTHS = (BLOCK_SIZE - 2, 5)
TABLE = np.array([[1, 2], [5, 6]], np.int32)
OTHER = Frame("step", body=NextTokens(np.array([[0, 9]], np.int32)).encode()).encode()  # it has a new block
STEPS = 4


def begin(
    made: NativeRunner, num_top: int = NO_LOGPROBS, mask: int = NO_MASK, generation: int = 1
) -> tuple[RunningPlan, SamplerOutput]:
    """Computes two prompts and a step behind them; returns its plan and its results."""
    for i, length in enumerate(LENGTHS):
        logits(made, range(3, 3 + length), (), first_block=1 + 4 * i)
    start = np.array(LENGTHS, np.int32)
    plan = RunningPlan(
        tokens=np.array([7, 8], np.int32),
        positions=start.copy(),
        slots=TABLE[:, 0] * BLOCK_SIZE + start,
        span_length=np.ones(2, np.int32),
        block_tables=TABLE,
        rows=pack([SamplingRow(i, temperature=1.0, seed=i, num_top=num_top, mask=mask) for i in range(2)]),
        generation=generation,
    )
    return plan, made.step(plan)


def encode(output: SamplerOutput) -> bytes:
    return result_frame(output).encode()


def take(engine: socket.socket, output: SamplerOutput) -> SamplerOutput:
    """Receives results as large as others."""
    return SamplerOutput.decode(engine.recv(len(encode(output)), socket.MSG_WAITALL)[16:])


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
    engine.sendall(NEXT_STEP * STEPS + OTHER)
    last = alone.decode_ahead(plan, Channel(rank, answers=True))
    assert last is not None
    assert last.tokens is not None
    assert not last.has_next
    tokens = first.token_ids
    for _ in range(STEPS):
        expected.advance(tokens, BLOCK_SIZE)
        one = guided.step(expected)
        tokens = one.token_ids
        answer = encode(one)
        assert engine.recv(len(answer), socket.MSG_WAITALL) == answer
    assert last.tokens.tolist() == tokens.tolist()
    assert rank.recv(100) == OTHER, "a message that says anything else stays where it is"
    expected.advance(tokens, BLOCK_SIZE)
    tokens_of_plan = plan.tokens.copy()
    plan.advance(last.tokens, BLOCK_SIZE)
    assert tokens_of_plan.tolist() != plan.tokens.tolist()
    for name in ("tokens", "positions", "slots", "span_context"):
        assert getattr(plan, name).tolist() == getattr(expected, name).tolist(), name
    assert plan.rows.new_number.tolist() == expected.rows.new_number.tolist()
    assert alone.step(plan).encode() == guided.step(expected).encode()
    alone.close()
    guided.close()


@pytest.mark.parametrize("num_rows", [0, 3, 70])
@pytest.mark.parametrize(
    "options", [{}, {"mask": WITH_CANDIDATES}, {"num_top": 2}, {"mask": 0}], ids=["plain", "candidates", "top", "mask"]
)
def test_a_step_sends_its_results(
    tmp_path: Path,
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    options: dict[str, Any],
) -> None:
    """Rows in parts, with masks or with log-probabilities go through Python, the others do not."""
    by_python, send = list[SamplerOutput](), Channel.send_result

    def record(channel: Channel, output: SamplerOutput) -> None:
        by_python.append(output)
        send(channel, output)

    monkeypatch.setattr(Channel, "send_result", record)
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made = runner(tmp_path)
    plan = RunningPlan(
        tokens=np.arange(3, 73, dtype=np.int32),
        positions=np.arange(70, dtype=np.int32),
        slots=BLOCK_SIZE + np.arange(70, dtype=np.int32),
        span_length=np.array([70], np.int32),
        block_tables=np.arange(1, 6, dtype=np.int32)[None],
        rows=pack([SamplingRow(70 - num_rows + i, temperature=1.0, seed=i, **options) for i in range(num_rows)]),
        generation=1,
    )
    channel, masks = Channel(rank, answers=True), np.full((1, 4), 0b1010, np.uint32)
    for number in (1, 2):  # the second finds what the first has made
        output = made.step(replace(plan, generation=number), lambda: masks, channel)
        assert len(output.token_ids) == num_rows
        assert engine.recv(len(encode(output)), socket.MSG_WAITALL) == encode(output)
    needs_python = num_rows > 64 or (num_rows > 0 and options in ({"num_top": 2}, {"mask": 0}))
    assert bool(by_python) == needs_python
    made.step(replace(plan, generation=3), lambda: masks, Channel(rank, answers=False))
    made.step(replace(plan, generation=4), lambda: masks)
    engine.setblocking(False)
    with pytest.raises(BlockingIOError):
        engine.recv(1)
    made.close()


def with_blocks(*blocks: tuple[int, int]) -> bytes:
    """Returns the message of a step in which spans go on in new blocks."""
    return Frame("step", body=NextTokens(np.array(blocks, np.int32).reshape(-1, 2)).encode()).encode()


@pytest.mark.parametrize("have_candidates", [False, True])
def test_steps_go_on_in_new_blocks_as_long_as_there_is_room_for_them(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, have_candidates: bool
) -> None:
    """The spans enter their second blocks in the steps 2 and 11; there is room for two more of each."""
    monkeypatch.setattr("tk.infer.engine.kernels.native.decode_ahead._NEW_BLOCKS", 2)
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    alone, guided = (runner(tmp_path, threads=threads) for threads in (2, 1))
    mask = WITH_CANDIDATES if have_candidates else NO_MASK
    (plan, output), (expected, _) = begin(alone, mask=mask), begin(guided, mask=mask)
    alone.step(plan := replace(plan, block_tables=TABLE[:, :1], generation=2))
    expected = replace(expected, block_tables=np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32), generation=2)
    added = {2: [(0, 2)], 11: [(1, 6)], 18: [(0, 3)], 27: [(1, 7)], 34: [(0, 4)]}
    tokens, answers = output.token_ids, list[bytes]()
    for number in range(1, 34):
        engine.sendall(with_blocks(*added.get(number, ())) + tokens_frame(tokens).encode() * have_candidates)
        expected.advance(tokens, BLOCK_SIZE)
        one = guided.step(expected)
        tokens = one.token_ids
        answers.append(encode(one))
    engine.sendall(with_blocks(*added[34]))
    last = alone.decode_ahead(plan, Channel(rank, answers=True))
    assert last is not None
    assert not last.has_next
    assert last.new_blocks.tolist() == [[0, 2], [1, 6], [0, 3], [1, 7]]
    for answer in answers:
        assert engine.recv(len(answer), socket.MSG_WAITALL) == answer
    assert rank.recv(100) == with_blocks((0, 4)), "it stays for the worker"
    assert plan.slots.tolist() == expected.slots.tolist()
    alone.close()
    guided.close()


@pytest.mark.parametrize("blocks", [[(1, 9)], [(2, 9)], [(-1, 9)], [(0, 9), (1, 9), (0, 9)]])
def test_blocks_that_no_step_of_these_spans_enters_stay_for_the_worker(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], blocks: list[tuple[int, int]]
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made = runner(tmp_path)
    plan, _ = begin(made)
    engine.sendall(NEXT_STEP + with_blocks(*blocks))
    ahead = made.decode_ahead(plan, Channel(rank, answers=True))
    assert ahead is not None
    assert not len(ahead.new_blocks)
    assert rank.recv(100) == with_blocks(*blocks)
    made.close()


def test_the_engine_chooses_tokens_among_candidates(tmp_path: Path, ends: tuple[socket.socket, socket.socket]) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    alone, guided = (runner(tmp_path, threads=threads) for threads in (2, 1))
    plan, output = begin(alone, mask=WITH_CANDIDATES)
    expected, first = begin(guided, mask=WITH_CANDIDATES)
    assert (first.candidates >= 0).all()
    assert output.encode() == first.encode()
    chosen, answers = first.candidates[[0, 1], [3, 0]], []
    for _ in range(STEPS):
        engine.sendall(NEXT_STEP + tokens_frame(chosen).encode())
        expected.advance(chosen, BLOCK_SIZE)
        answers.append(guided.step(expected))
        chosen = answers[-1].candidates[[0, 1], [0, 5]]
    engine.sendall(NEXT_STEP + OTHER)
    assert alone.decode_ahead(plan, Channel(rank, answers=True)) == DecodedAhead(None, has_next=True)
    for answer in map(encode, answers):
        assert engine.recv(len(answer), socket.MSG_WAITALL) == answer
    assert rank.recv(100) == OTHER, "a message that says anything else stays where it is"
    mask = np.zeros((1, 4), np.uint32)
    mask[0, 2] = 1 << 5
    for made in (alone, guided):
        assert made.sample_again(mask, np.array([1], np.int32)).token_ids[1] == 2 * 32 + 5
    for each in (plan, expected):
        each.advance(chosen, BLOCK_SIZE)
    assert plan.tokens.tolist() == expected.tokens.tolist()
    assert alone.step(plan).encode() == guided.step(expected).encode()
    engine.sendall(NEXT_STEP)
    engine.close()
    assert alone.decode_ahead(plan, Channel(rank, answers=True)) == DecodedAhead(None, has_next=True), (
        "the engine has ended"
    )
    alone.close()
    guided.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_sampled_again_with_masks(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], threads: int
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    alone, guided = runner(tmp_path, threads=threads), runner(tmp_path)
    plan, _ = begin(alone, mask=WITH_CANDIDATES)
    expected, first = begin(guided, mask=WITH_CANDIDATES)
    chosen = first.candidates[:, 0]
    for _ in range(STEPS):
        sent = []
        for rows in ([1], [0, 1]):
            masks = np.zeros((len(rows), 4), np.uint32)
            masks[:, 2] = 1 << np.array([5, 9][: len(rows)])
            frame = masks_frame(masks, np.array(rows, np.int32)).encode()
            engine.sendall((NEXT_STEP if rows == [1] else b"") + frame)
            sent.append(guided.sample_again(masks, np.array(rows, np.int32)))
        assert [each.token_ids.tolist()[1] for each in sent] == [69, 73]
        chosen = sent[-1].token_ids
        engine.sendall(tokens_frame(chosen).encode())
        assert alone.decode_ahead(plan, Channel(rank, answers=True)) == DecodedAhead(None, has_next=False)
        expected.advance(chosen, BLOCK_SIZE)
        step = guided.step(expected)
        answers = [take(engine, step) for _ in range(3)]
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
    plan, _ = begin(made)
    engine.sendall(NEXT_STEP)
    assert made.decode_ahead(plan, Channel(rank, answers=False)) is not None
    engine.setblocking(False)
    with pytest.raises(BlockingIOError):
        engine.recv(1)
    made.close()


@pytest.mark.parametrize("message", [b"", NEXT_STEP[:-1], OTHER])
def test_without_the_message_there_is_no_step(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], message: bytes
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    engine, rank = ends
    made = runner(tmp_path)
    plan, _ = begin(made)
    before = deepcopy(plan)
    engine.sendall(message)
    assert made.decode_ahead(plan, Channel(rank, answers=True)) is None
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
    channel = Channel(rank, answers=True)
    engine.sendall(NEXT_STEP)
    plan, _ = begin(made, num_top=0)
    assert made.decode_ahead(plan, channel) is None
    plan, _ = begin(made, generation=0)
    assert made.decode_ahead(plan, channel) is None, "it is carried out once"
    plan, _ = begin(made, generation=3)
    assert made.decode_ahead(replace(plan, generation=2), channel) is None, "it is not the last one"
    several = RunningPlan(
        tokens=np.array([3, 4, 5], np.int32),
        positions=np.arange(3, dtype=np.int32),
        slots=BLOCK_SIZE + np.arange(3, dtype=np.int32),
        span_length=np.array([3], np.int32),
        block_tables=TABLE[:1],
        rows=plan.rows.part(0, 1),
        generation=4,
    )
    made.step(several)
    assert made.decode_ahead(several, channel) is None
    assert rank.recv(100) == NEXT_STEP
    made.close()


def test_a_plan_that_advances_gives_the_samples_of_new_plans(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path)
    advancing, renewing = runner(tmp_path), runner(tmp_path, threads=2)
    (plan, output), (_, expected) = begin(advancing), begin(renewing)
    found = []
    for _ in range(5):
        assert output.encode() == expected.encode()
        found.append(output.token_ids.tolist())
        plan.advance(output.token_ids, BLOCK_SIZE)
        again = replace(deepcopy(plan), generation=0)
        output, expected = advancing.step(plan), renewing.step(again)
    assert len(np.unique(found, axis=0)) > 1
    advancing.close()
    renewing.close()
