"""Frames of several ranks: none is lost or waits where bytes come in other pieces than they were sent in."""

import io
import random
import socket
from collections.abc import Iterator, Sequence

import pytest

from tk.infer.engine.step.channel import Frame, FrameReader
from tk.infer.engine.step.rank_frames import RankFrames


@pytest.fixture
def ends() -> Iterator[tuple[RankFrames, list[socket.socket], socket.socket, list[int]]]:
    """The frames of two ranks, the ranks' ends, the socket that wakes, and how often a reader has waited."""
    wake, woken = socket.socketpair()
    frames, ranks, ours, waits = RankFrames(woken), [], [], list[int]()
    for _ in range(2):
        own, theirs = socket.socketpair()
        own.setblocking(False)
        frames.add(own, lambda: waits.append(1))
        ours.append(own)
        ranks.append(theirs)
    yield frames, ranks, wake, waits
    frames.close()
    for each in (wake, woken, *ours, *ranks):
        each.close()


def test_frames_that_come_together_are_all_seen(
    ends: tuple[RankFrames, list[socket.socket], socket.socket, list[int]],
) -> None:
    frames, ranks, wake, _ = ends
    assert frames.wait(0) == ([], False)
    sent = [Frame("result", body=bytes([number]) * number) for number in range(4)]
    ranks[1].sendall(b"".join(frame.encode() for frame in sent))
    ranks[0].sendall(Frame("error", {"error": "é"}).encode())
    wake.send(b"w")
    ready, is_woken = frames.wait(1)
    assert (sorted(ready), is_woken) == ([0, 1], True)
    for number, frame in enumerate(sent):
        ready, _ = frames.wait(1)
        assert 1 in ready
        assert frames.receive(1) == frame
        if number == 1:
            assert frames.receive(0) == Frame("error", {"error": "é"})
    assert frames.wait(0) == ([], True)


def test_frames_come_in_any_pieces() -> None:
    choices = random.Random(0)
    sent = [Frame("result", {"x": [1]} if choices.random() < 0.3 else {}, choices.randbytes(n)) for n in range(60)]
    sent += [Frame("result", body=choices.randbytes(9000)), Frame("result")]
    data = io.BytesIO(b"".join(frame.encode() for frame in sent))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        reader = FrameReader(ours, lambda: theirs.sendall(data.read(choices.randrange(300))))
        for frame in sent:
            assert reader.receive() == frame
        assert not reader.has_frame
        theirs.close()
        assert reader.receive() is None


def test_the_end_of_a_rank_is_no_frame(ends: tuple[RankFrames, list[socket.socket], socket.socket, list[int]]) -> None:
    frames, ranks, _, waits = ends
    ranks[1].sendall(Frame("result", body=b"whole").encode() + b"result  ")
    ranks[1].close()
    assert frames.wait(1) == ([1], False)
    assert frames.receive(1) == Frame("result", body=b"whole")
    assert frames.receive(1) is None, "a part of a frame is none"
    frames.forget()
    assert frames.wait(0) == ([], False)
    assert not waits


def test_those_beside_are_noticed() -> None:
    wake, woken = socket.socketpair()
    own, rank = socket.socketpair()
    own.setblocking(False)
    with wake, woken, own, rank:
        beside, seen = RankFrames(woken), list[Sequence[int]]()
        frames = RankFrames(woken, beside, lambda: seen.append(beside.wait(0)[0]))
        beside.add(own, lambda: None)
        assert frames.wait(0) == ([], False)
        rank.sendall(Frame("error").encode())
        assert frames.wait(1) == ([], True)
        assert seen == [[0]]
        assert beside.receive(0) == Frame("error")
        assert frames.wait(0) == ([], False)
        frames.close()
        beside.close()
