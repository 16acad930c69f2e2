"""The rendezvous of ranks that torchrun started: all ranks of an attempt agree on a prefix for its keys in the store.

torchrun's agents keep one store over all restarts (torch 2.13, pytorch issue 167288), so a restarted rank may find the
address of a dead one there. Rank 0 therefore draws a random name for the attempt. Each other rank writes a question
with a random id, and rank 0 writes the name as the answer to that id, which no earlier attempt can have answered.

    rank r   question/r = id                          waits for answer/id = name   here/r, under the name
    rank 0   waits for all questions   answer/id = name   waits until all ranks are here
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
    """Returns the store of this attempt, for `init_process_group`; every rank calls it.

    Raises:
        WorkerDied: a rank did not arrive within the timeout; the message names it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world, is_master=False, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    name = _invite(store, world, deadline) if rank == 0 else _ask(store, rank, deadline)
    return PrefixStore(f"tk/{name}", store)


def _invite(store: Store, world: int, deadline: float) -> str:
    """Draws the attempt's name on rank 0, and answers questions with it until all ranks of the attempt are here.

    Rank 0 also answers questions of dead ranks, since it cannot distinguish them from others.
    """
    name = uuid.uuid4().hex
    missing = list(range(1, world))
    if missing and not _wait(store, [f"tk/question/{rank}" for rank in missing], deadline):
        raise _stayed_away([rank for rank in missing if not store.check([f"tk/question/{rank}"])], world)
    answered: set[bytes] = set()
    pause = _FIRST_PAUSE_SECONDS
    while missing:  # polling: a rank may replace a dead rank's question, and the store cannot wait for a change
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
    """Asks rank 0 for the attempt's name and confirms it."""
    question = uuid.uuid4().hex
    store.set(f"tk/question/{rank}", question)
    if not _wait(store, [f"tk/answer/{question}"], deadline):
        raise _too_late("rank 0 did not answer")
    name: str = store.get(f"tk/answer/{question}").decode()
    store.set(f"tk/{name}/here/{rank}", "")
    return name


def _wait(store: Store, keys: list[str], deadline: float) -> bool:
    """Waits for keys of the store; returns whether all of them are set before the deadline.

    It is one call of the store, on a thread, so that the main thread can still handle signals.
    """
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
    return _too_late(f"ranks {', '.join(map(str, ranks))} of {world} did not arrive")


def _too_late(problem: str) -> WorkerDied:
    return WorkerDied(f"Rendezvous: {problem} within [parallel] timeout_seconds. See the logs of their nodes.")
