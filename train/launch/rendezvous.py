"""Where ranks that torchrun started meet: a corner of the agents' store that belongs to this attempt alone.

torchrun's agents keep one store over all restarts (torch 2.13, pytorch issue 167288), so that a restarted rank may find
the address of a dead one there. Rank 0 therefore draws a name for the attempt and tells it to every rank that has
asked under a name of its own, which no earlier attempt can have answered.
"""

import os
import threading
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from ...core.errors import WorkerDied

_FIRST_PAUSE_SECONDS = 0.005
_LAST_PAUSE_SECONDS = 1.0


def agents_keep_a_store() -> bool:
    """Whether this rank shares a store with torchrun's agents."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous_store(rank: int, world: int, timeout: timedelta) -> Store:
    """The store of this attempt, for `init_process_group`; every rank calls it.

    Raises:
        WorkerDied: some rank stayed away.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world, is_master=False, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    name = _invite(store, world, deadline) if rank == 0 else _ask(store, rank, deadline)
    return PrefixStore(f"tk/{name}", store)


def _invite(store: Store, world: int, deadline: float) -> str:
    """Rank 0: answers every question, stale ones too, until all ranks of this attempt have confirmed."""
    name = uuid.uuid4().hex
    missing = list(range(1, world))
    if missing and not _wait(store, [f"tk/question/{rank}" for rank in missing], deadline):
        raise _stayed_away([rank for rank in missing if not store.check([f"tk/question/{rank}"])], world)
    answered: set[bytes] = set()
    pause = _FIRST_PAUSE_SECONDS
    while missing:  # a living rank's question replaces a dead one's, which no wait of the store shows
        for rank in missing:
            question = store.get(f"tk/question/{rank}")
            if question not in answered:
                store.set(f"tk/answer/{question.decode()}", name)
                answered.add(question)
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        missing = [rank for rank in missing if not store.check([f"tk/{name}/here/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise _stayed_away(missing, world)
    return name


def _ask(store: Store, rank: int, deadline: float) -> str:
    question = uuid.uuid4().hex
    store.set(f"tk/question/{rank}", question)
    if not _wait(store, [f"tk/answer/{question}"], deadline):
        raise _too_late("rank 0 did not answer")
    name: str = store.get(f"tk/answer/{question}").decode()
    store.set(f"tk/{name}/here/{rank}", "")
    return name


def _wait(store: Store, keys: list[str], deadline: float) -> bool:
    """Whether the store has all keys before the deadline. It is asked once, on a thread of its own: the main thread
    goes on handling signals, which a call into the store would put off."""
    came: list[bool] = []

    def wait() -> None:
        try:
            store.wait(keys, timedelta(seconds=max(0.0, deadline - time.monotonic())))
        except DistStoreError:
            return
        came.append(True)

    thread = threading.Thread(target=wait, name="tk-rendezvous", daemon=True)
    thread.start()
    thread.join()
    return bool(came)


def _stayed_away(ranks: list[int], world: int) -> WorkerDied:
    return _too_late(f"ranks {', '.join(map(str, ranks))} of {world} did not come")


def _too_late(problem: str) -> WorkerDied:
    return WorkerDied(f"While ranks met, {problem} within [parallel] timeout_seconds; look at their nodes' logs.")
