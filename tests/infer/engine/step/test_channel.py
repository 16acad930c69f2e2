"""The socket between the engine and a rank: frames and errors cross it, and those of steps hold what was packed."""

import socket

import numpy as np
import pytest

from tk.core.errors import InvalidRequest, WorkerDied
from tk.infer.engine.step.channel import (
    NEXT_STEP,
    Channel,
    Frame,
    error_frame,
    error_from,
    masks_frame,
    masks_from,
    receive,
    result_frame,
    send,
    tokens_frame,
)
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.step_message import NEXT_TOKENS, NextTokens, decode_message

MASKS = np.array([[1, 2, 3], [4, 5, 2**32 - 1]], np.uint32)


def test_frames_and_errors_cross_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for frame in (Frame("ready", {"x": [1, "é"]}, b"body"), Frame("tokens"), Frame("step", body=b"\0" * 99)):
            send(ours, frame)
            assert receive(theirs) == frame
        send(ours, error_frame(InvalidRequest("not so")))
        answer = receive(theirs)
        assert answer is not None
        error = error_from(answer)
        assert (type(error), str(error)) == (InvalidRequest, "not so")
        ours.close()
        assert receive(theirs) is None
        with pytest.raises(WorkerDied):
            send(theirs, Frame("step"))


def test_frames_of_steps_hold_what_was_packed() -> None:
    rows, tokens = np.array([5, 0], np.int32), np.array([7, -1], np.int32)
    for frame, op, expected in ((masks_frame(MASKS), "masks", []), (masks_frame(MASKS, rows), "again", [5, 0])):
        masks, found = masks_from(frame)
        assert (frame.op, masks.tolist(), found.tolist()) == (op, MASKS.tolist(), expected)
    assert np.frombuffer(tokens_frame(tokens).body, np.int32).tolist() == [7, -1]


def test_a_rank_answers_only_if_it_is_to() -> None:
    ours, theirs = socket.socketpair()
    output = SamplerOutput.of_tokens(np.array([3], np.int32), np.ones(1, np.uint8))
    with ours, theirs:
        Channel(theirs, answers=False).send_result(output)
        channel = Channel(theirs, answers=True)
        channel.send_result(output)
        assert receive(ours) == result_frame(output)
        ours.sendall(NEXT_STEP)
        send(ours, masks_frame(MASKS))
        frame = channel.receive()
        assert frame is not None
        step = decode_message(frame.body)
        assert isinstance(step, NextTokens)
        assert step.blocks.shape == NEXT_TOKENS.blocks.shape == (0, 2)
        assert channel.receive_masks().tolist() == MASKS.tolist()
        ours.close()
        with pytest.raises(WorkerDied, match="before it sent the masks"):
            channel.receive_masks()
