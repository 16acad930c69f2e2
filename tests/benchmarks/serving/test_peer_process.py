"""Peers in processes of their own: replies, and what becomes of one that fails."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.serving.peer_process import PeerFailed, PeerProcess

PEER = """
import sys
from tk.benchmarks.peers.serve_loop import serve

def load():
    print("a library's words")
    if sys.argv[1] == "fail":
        sys.exit("no such model")
    if sys.argv[1] == "hang":
        sys.stdin.readline()
    return run

def run(workload):
    if workload.batch == 13:
        raise RuntimeError("13 is too many")
    return {"prefill": workload.batch * workload.windows}

serve(load)
"""


def start(folder: Path, how: str, timeout: float = 60.0) -> PeerProcess:
    """Starts a peer that says what it is asked for."""
    return PeerProcess("fake", [sys.executable, "-c", PEER, how], folder / "log", timeout)


def test_workloads_are_answered_one_by_one_and_words_on_stdout_are_not_answers(tmp_path: Path) -> None:
    with closing(start(tmp_path, "load")) as peer:
        assert peer.run(SpeedWorkload(4, 8, 1, windows=5)) == {"prefill": 20}
        assert peer.run(SpeedWorkload(7, 8, 1)) == {"prefill": 7}
        assert peer.ready_seconds > 0
    assert (tmp_path / "log").read_text() == "a library's words\n"


def test_a_peer_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"^fake failed: no such model \(see .*log\)$"):
        start(tmp_path, "fail")


def test_a_failed_workload_ends_the_peer(tmp_path: Path) -> None:
    peer = start(tmp_path, "load")
    with pytest.raises(PeerFailed, match="13 is too many"):
        peer.run(SpeedWorkload(13, 8, 1))
    with pytest.raises(PeerFailed, match="13 is too many"):
        peer.run(SpeedWorkload(1, 8, 1))


def test_a_peer_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="fake failed"):
        start(tmp_path, "hang", timeout=0.1)
