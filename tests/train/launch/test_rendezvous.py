"""The rendezvous under torchrun: ranks meet the ranks of their attempt, with any keys of earlier ones in the store."""

import os
import signal
import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import Store, TCPStore

from tk.core.errors import WorkerDied
from tk.train.launch.rendezvous import rendezvous_store

WORLD = 3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """Starts the store that torchrun's agent keeps over restarts."""
    store = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def _meet(ranks: range, world: int) -> dict[int, Store]:
    stores: dict[int, Store] = {}

    def join(rank: int) -> None:
        stores[rank] = rendezvous_store(rank, world, timedelta(seconds=20))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stores


def test_an_attempt_does_not_see_the_keys_of_another(server: TCPStore) -> None:
    before = _meet(range(WORLD), WORLD)
    before[0].set("address", "of a dead rank")
    assert before[2].get("address") == b"of a dead rank"
    after = _meet(range(WORLD), WORLD)
    assert not any(store.check(["address"]) for store in after.values())
    after[1].set("address", "of a living one")
    assert after[0].get("address") == b"of a living one"
    smaller = _meet(range(2), 2)
    assert set(smaller) == {0, 1}


def test_questions_of_dead_ranks_do_no_harm(server: TCPStore) -> None:
    server.set("tk/question/1", "asked before it died")
    assert set(_meet(range(2), 2)) == {0, 1}


def test_signals_are_handled_while_a_rank_waits(server: TCPStore) -> None:
    """Rank 0 arrives only after the signal has been handled."""
    handled: list[str] = []
    comes = threading.Thread(target=rendezvous_store, args=(0, 2, timedelta(seconds=60)))

    def handle(number: int, frame: object) -> None:
        handled.append(threading.current_thread().name)
        comes.start()

    before = signal.signal(signal.SIGUSR1, handle)
    asked = threading.Thread(target=_signal_when_asked, args=(server, os.getpid()))
    asked.start()
    try:
        rendezvous_store(1, 2, timedelta(seconds=60))
    finally:
        signal.signal(signal.SIGUSR1, before)
        asked.join()
        comes.join()
    assert handled == ["MainThread"]


def _signal_when_asked(server: TCPStore, process: int) -> None:
    server.wait(["tk/question/1"], timedelta(seconds=60))
    os.kill(process, signal.SIGUSR1)


def test_a_rank_that_is_late_for_a_second_attempt_is_answered(server: TCPStore) -> None:
    """Its question of the first attempt is there already when rank 0 begins."""
    _meet(range(2), 2)
    first = threading.Thread(target=rendezvous_store, args=(0, 2, timedelta(seconds=60)))
    first.start()
    stale = server.get("tk/question/1").decode()
    server.wait([f"tk/answer/{stale}"], timedelta(seconds=60))
    rendezvous_store(1, 2, timedelta(seconds=60))
    first.join(60)
    assert not first.is_alive()


def test_a_rank_that_does_not_arrive_is_named(server: TCPStore) -> None:
    with pytest.raises(WorkerDied, match="ranks 1, 2 of 3 did not arrive"):
        rendezvous_store(0, WORLD, timedelta(seconds=0.3))
    with pytest.raises(WorkerDied, match="rank 0 did not answer"):
        rendezvous_store(1, WORLD, timedelta(seconds=0.3))
