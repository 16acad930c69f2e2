"""Loaders at both ends of their sockets, on threads of this process: all ranks pack an adapter, or none keeps it."""

import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tk.core.errors import CheckpointError, StorageError, TkError, WorkerDied
from tk.infer.engine.worker.adapter_loader import AdapterLoader
from tk.infer.engine.worker.adapter_loaders import AdapterLoaders
from tk.infer.engine.worker.adapter_order import AdapterOrder

WAIT_SECONDS = 60.0


def order(slot: int) -> AdapterOrder:
    return AdapterOrder(slot, f"/adapter-{slot}", "", {})


class Ranks:
    """Two ranks; each answers an order when the test gives it an error, or None."""

    def __init__(self, stack: ExitStack) -> None:
        self.words: list[queue.SimpleQueue[Exception | None]] = [queue.SimpleQueue() for _ in range(2)]
        self.slots: list[list[int]] = [[], []]
        self.loaders: list[AdapterLoader] = []
        ours = []
        for rank in range(2):
            near, far = socket.socketpair()
            self.loaders.append(AdapterLoader(far, self._packer(rank)))
            stack.callback(self.loaders[-1].close)
            ours.append(near)
        self.engine = AdapterLoaders(ours)
        stack.callback(self.engine.close)

    def answer(self, *words: Exception | None) -> None:
        """Lets the ranks answer their next orders."""
        for each, word in zip(self.words, words, strict=True):
            each.put(word)

    def put(self, number: int) -> None:
        """Does what the ranks do when the engine lets them put a packed adapter into its slot."""
        for loader in self.loaders:
            loader.put(number)

    def _packer(self, rank: int) -> Callable[[AdapterOrder], Callable[[], object]]:
        def pack(order: AdapterOrder) -> Callable[[], object]:
            error = self.words[rank].get(timeout=WAIT_SECONDS)
            if error is not None:
                raise error
            return lambda: self.slots[rank].append(order.slot)

        return pack


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack)


def test_an_adapter_is_packed_by_all_ranks_and_is_in_its_slot_when_it_is_put_there(ranks: Ranks) -> None:
    ranks.answer(None, None)
    first = ranks.engine.pack(order(0), WAIT_SECONDS)
    ranks.answer(None, None)
    second = ranks.engine.pack(order(1), WAIT_SECONDS)
    assert ranks.slots == [[], []]
    for packed in (second, first):
        ranks.put(packed.number)
    assert ranks.slots == [[1, 0], [1, 0]]


@pytest.mark.parametrize(("wrong", "right"), [(0, 1), (1, 0)])
def test_what_one_rank_refuses_no_rank_keeps(ranks: Ranks, wrong: int, right: int) -> None:
    ranks.words[wrong].put(CheckpointError("/adapter-0 is damaged."))
    ranks.words[right].put(None)
    with pytest.raises(CheckpointError, match="/adapter-0 is damaged"):
        ranks.engine.pack(order(0), WAIT_SECONDS)
    ranks.answer(None, None)
    ranks.put(ranks.engine.pack(order(1), WAIT_SECONDS).number)
    assert ranks.slots == [[1], [1]]
    assert [loader._packed for loader in ranks.loaders] == [{}, {}]


def test_a_defect_of_a_loader_is_that_of_its_load_alone(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.answer(ZeroDivisionError("injected"), None)
    with pytest.raises(TkError, match=r"A loader of adapters .* failed by a defect of tk \(ZeroDivisionError\)"):
        ranks.engine.pack(order(0), WAIT_SECONDS)
    assert [record.exc_info is not None for record in caplog.records] == [True], "the log has its traceback"
    ranks.answer(None, None)
    ranks.engine.pack(order(0), WAIT_SECONDS)


def test_an_answer_that_comes_too_late_is_not_that_to_the_next_order(ranks: Ranks) -> None:
    ranks.words[0].put(None)
    with pytest.raises(StorageError, match="have not read and packed /adapter-0 in time"):
        ranks.engine.pack(order(0), 0.01)
    ranks.words[1].put(CheckpointError("too late"))
    ranks.answer(None, None)
    ranks.put(ranks.engine.pack(order(1), WAIT_SECONDS).number)
    assert ranks.slots == [[1], [1]]
    assert [loader._packed for loader in ranks.loaders] == [{}, {}]


@pytest.mark.parametrize("how", ["engine", "rank"])
def test_a_load_ends_with_its_workers_or_the_engine(ranks: Ranks, how: str) -> None:
    """It does not wait for the ranks that pack; nor does a later one."""
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(ranks.engine.pack, order(slot), WAIT_SECONDS) for slot in range(2)]
        if how == "engine":
            ranks.engine.end()
        else:
            ranks.loaders[0]._connection.shutdown(socket.SHUT_RDWR)
        for load in loads:
            assert isinstance(load.exception(WAIT_SECONDS / 2), WorkerDied)
    ranks.engine.close()
    with pytest.raises(WorkerDied):
        ranks.engine.pack(order(0), WAIT_SECONDS)
    for _ in loads:
        ranks.answer(None, None)
