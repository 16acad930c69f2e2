"""Where ranks that torchrun started meet: a corner of the agents' store that belongs to this attempt alone.

torchrun's agents keep one store over all restarts (torch 2.13, pytorch issue 167288), so that a restarted rank may find
the address of a dead one there. Rank 0 therefore draws a name for the attempt and tells it to every rank that has
asked under a name of its own, which no earlier attempt can have answered.
"""

import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ...core.errors import WorkerDied

_POLL_SECONDS = 0.02


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
    answered: set[bytes] = set()
    missing = set(range(1, world))
    while missing:
        for rank in sorted(missing):
            if store.check([f"tk/{name}/here/{rank}"]):
                missing.discard(rank)
            elif store.check([f"tk/question/{rank}"]):
                question = store.get(f"tk/question/{rank}")
                if question not in answered:
                    store.set(f"tk/answer/{question.decode()}", name)
                    answered.add(question)
        _pause(deadline, f"ranks {', '.join(map(str, sorted(missing)))} of {world} did not come")
    return name


def _ask(store: Store, rank: int, deadline: float) -> str:
    question = uuid.uuid4().hex
    store.set(f"tk/question/{rank}", question)
    while not store.check([f"tk/answer/{question}"]):
        _pause(deadline, "rank 0 did not answer")
    name: str = store.get(f"tk/answer/{question}").decode()
    store.set(f"tk/{name}/here/{rank}", "")
    return name


def _pause(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise WorkerDied(f"While ranks met, {what} within [parallel] timeout_seconds; look at their nodes' logs.")
    time.sleep(_POLL_SECONDS)
