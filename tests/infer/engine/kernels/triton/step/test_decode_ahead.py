"""Steps that follow on the device: those that come one by one, until another message comes."""

import socket
from pathlib import Path

import numpy as np
import pytest

from tk.infer.engine.step.channel import NEXT_STEP, Channel, Frame
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.step_message import NextTokens
from tk.tests.infer.engine.kernels.triton.run.test_model_runner import BLOCK, decoding, prompts
from tk.tests.infer.engine.kernels.triton.runners import runners
from tk.tests.infer.sampling_row import SamplingRow
from tk.tests.model.architectures import ENTRIES

OTHER = Frame("step", body=NextTokens(np.array([[0, 9]], np.int32)).encode()).encode()  # it has a new block
ROWS = [SamplingRow(0), SamplingRow(1, temperature=0.8, seed=3), SamplingRow(2)]
STEPS = 4


def results(engine: socket.socket, like: SamplerOutput, count: int) -> list[list[int]]:
    """Receives the tokens of results as large as another."""
    size = 16 + len(like.encode())
    found = [SamplerOutput.decode(engine.recv(size, socket.MSG_WAITALL)[16:]) for _ in range(count)]
    return [each.token_ids.tolist() for each in found]


@pytest.mark.parametrize("behind", [OTHER, b""])
def test_steps_are_those_that_come_one_by_one(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], behind: bytes
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    (alone, *_), (guided, *_) = (runners(tmp_path, max_running=4) for _ in range(2))
    for made in (alone, guided):
        made.step(prompts())
    plan, like = decoding(ROWS), decoding(ROWS)
    first, expected = alone.step(plan), [guided.step(like)]
    for _ in range(STEPS):
        like.advance(expected[-1].token_ids, BLOCK)
        expected.append(guided.step(like))
    engine, rank = ends
    engine.sendall(NEXT_STEP * STEPS + behind)
    if not behind:
        engine.shutdown(socket.SHUT_WR)  # the engine has ended
    ahead = alone.decode_ahead(plan, Channel(rank, answers=True))
    assert ahead is not None
    assert ahead.tokens is not None
    assert ahead.tokens.tolist() == expected[-1].token_ids.tolist()
    assert results(engine, first, STEPS) == [each.token_ids.tolist() for each in expected[1:]]
    assert (plan.tokens.tolist(), plan.slots.tolist()) == (like.tokens.tolist(), like.slots.tolist())
    assert (plan.positions.tolist(), plan.rows.new_number.tolist()) == (
        like.positions.tolist(),
        like.rows.new_number.tolist(),
    )
    assert rank.recv(len(OTHER)) == behind, "the frame is left to the worker"


def test_another_message_is_left_at_once(tmp_path: Path, ends: tuple[socket.socket, socket.socket]) -> None:
    ENTRIES["llama3"].make(tmp_path)
    made, *_ = runners(tmp_path, max_running=4)
    made.step(prompts())
    plan = decoding(ROWS)
    made.step(plan)
    ends[0].sendall(OTHER)
    assert made.decode_ahead(plan, Channel(ends[1], answers=True)) is None
    made.step(decoding([*ROWS[:2], SamplingRow(2, top_k=3, temperature=1.0)]))
    assert made.decode_ahead(plan, Channel(ends[1], answers=True)) is None, "the host chooses one of the tokens"
