"""Shared loading by the ranks of one host: one rank reads and checks each block, and all copy it from shared memory.

In a round every rank fills its area with blocks. Then all ranks copy the elements that they need, and fill their other
area for the next round. The areas are anonymous memory, which the kernel frees when the ranks end in any way. If a rank
dies, the caller's `Peers.gather` fails between rounds. An error of one rank is raised by all.
"""

import json
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ...core import dtypes
from ...core.casts import Array, cast
from ...core.errors import DamagedCheckpoint, StorageError, TkError, pack, unpack
from ..files.data_files import DataFiles
from ..format.region import Region, copy_region
from .chunk_blocks import read_span
from .read_plan import AREA, Block, Read, ReadPlanner, ReadRequest, Span, from_rows, to_rows
from .reader import Checkpoint
from .stored_array import StoredArray

Deliver: TypeAlias = Callable[[int, StoredArray], object]
_NUM_AREAS: Final = 2  # areas per rank: one is filled from disk while ranks copy from the other


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of one host that load together.

    Attributes:
        rank: this rank's index among them.
        size: the number of ranks.
        gather: returns the arguments of all ranks in rank order; every rank calls it.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[bytes], list[bytes]] = lambda mine: [mine]


ALONE: Final = Peers()


def read_all(
    checkpoint: Checkpoint, requests: Sequence[ReadRequest], deliver: Deliver, peers: Peers = ALONE, threads: int = 1
) -> None:
    """Reads parts of tensors; every rank of `peers` calls it with its own requests.

    The ranks share the reads, so that each needed block is read once. If they would read little more alone (as at the
    layout that saved the checkpoint), each rank reads alone.

    Args:
        checkpoint: the same checkpoint on every rank.
        requests: the parts that this rank needs.
        deliver: called with the index of a request and its values, in any order; on several threads at once if there
            are several.
        peers: the ranks that load together.
        threads: the number of threads of a rank that reads alone.

    Raises:
        CheckpointError, StorageError: the errors of `Checkpoint.read`; every rank raises the error of one.
    """
    planner, spans = ReadPlanner(checkpoint), list[tuple[Span, ...]]()
    with share_errors(peers):
        spans += map(planner.spans, requests)
    rows = json.dumps(to_rows(span for some in spans for span in some))
    needs = [from_rows(json.loads(theirs)) for theirs in peers.gather(rows.encode())]
    if planner.is_worth_sharing(needs):
        areas = _Areas.open(peers)
        if areas:
            _SharedRead(planner, requests, spans, deliver, areas).run(planner.union(needs), peers)
            with share_errors(peers):
                checkpoint.folder.require_unchanged()
            return
    with share_errors(peers):
        _read_alone(checkpoint, requests, deliver, threads)
        checkpoint.folder.require_unchanged()


def open_together(find: Callable[[], Checkpoint], peers: Peers) -> Checkpoint:
    """Opens on every rank the checkpoint that rank 0 finds.

    Only rank 0 searches, because a run folder may get a newer step between the searches of two ranks.

    Raises:
        CheckpointError, StorageError: one rank cannot open the checkpoint; all ranks raise.
    """
    with share_errors(peers):
        found = find() if peers.rank == 0 else None
    place = peers.gather(os.fsencode(found.path.absolute()) if found else b"")[0]
    with share_errors(peers):
        return Checkpoint.open(os.fsdecode(place)) if found is None else found


def _read_alone(checkpoint: Checkpoint, requests: Sequence[ReadRequest], deliver: Deliver, threads: int = 1) -> None:
    def read(index: int) -> None:
        request = requests[index]
        deliver(index, checkpoint.read(request.tensor, request.box, request.slot, request.flat, request.dtype))

    if threads == 1:
        for index in range(len(requests)):
            read(index)
        return
    with ThreadPoolExecutor(threads, "tk-load") as pool:
        for _ in pool.map(read, range(len(requests))):  # raises the first error, and begins no other read
            pass


class _Areas:
    """The shared memory of all ranks, mapped into one of them."""

    def __init__(self, memories: list[memoryview]) -> None:
        self._memories = memories

    @staticmethod
    def open(peers: Peers) -> "_Areas | None":
        """Makes this rank's areas and maps the other ranks'; None on every rank if one rank cannot map them."""
        with ExitStack() as stack:
            own = os.memfd_create("tk-load", os.MFD_CLOEXEC)
            stack.callback(os.close, own)
            os.ftruncate(own, _NUM_AREAS * AREA)
            places = [json.loads(place) for place in peers.gather(json.dumps([os.getpid(), own]).encode())]
            try:
                memories = [_map(process_id, fd) for process_id, fd in places]
            except OSError:  # no /proc, or one that hides other processes
                memories = []
            if not all(peers.gather(b"mapped" if memories else b"")):
                return None
            return _Areas(memories)

    def view(self, rank: int, number: int, at: int, nbytes: int) -> memoryview:
        """Returns `nbytes` bytes of a rank's area of round `number`, starting at byte `at`."""
        start = number % _NUM_AREAS * AREA + at
        return self._memories[rank][start : start + nbytes]


def _map(process_id: int, fd: int) -> memoryview:
    mine = os.open(f"/proc/{process_id}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(mine, _NUM_AREAS * AREA))
    finally:
        os.close(mine)


class _SharedRead:
    """One rank's share of a load."""

    def __init__(
        self,
        planner: ReadPlanner,
        requests: Sequence[ReadRequest],
        spans: Sequence[Sequence[Span]],
        deliver: Deliver,
        areas: _Areas,
    ) -> None:
        self._planner, self._requests, self._deliver, self._areas = planner, requests, deliver, areas
        self._left = [len(some) for some in spans]
        self._values: dict[int, Array] = {}
        self._waiting: dict[Block, list[int]] = defaultdict(list)  # indices of requests by the block that they need
        for index, some in enumerate(spans):
            for span in some:
                self._waiting[planner.block(span)].append(index)

    def run(self, union: Sequence[Span], peers: Peers) -> None:
        """Reads this rank's share of `union`, and delivers the values of its requests."""
        rounds = self._planner.assign_rounds(union, peers.size)
        with DataFiles(self._planner.checkpoint.folder.open_data) as files:
            for number in range(len(rounds) + 1):
                with share_errors(peers):  # also a barrier: all ranks have read and copied before the next round
                    if number == 0:
                        self._deliver_empty()
                    else:
                        self._copy(rounds[number - 1], number - 1)
                    if number < len(rounds):
                        self._read([read for read in rounds[number] if read.rank == peers.rank], number, files)

    def _read(self, reads: Sequence[Read], number: int, files: DataFiles) -> None:
        for read in reads:
            chunk, itemsize = self._planner.chunk(read.span), self._planner.dtype(read.span).itemsize
            memory = self._areas.view(read.rank, number, read.at, self._planner.nbytes(read.span))
            path = self._planner.checkpoint.path / chunk.file
            read_span(files.open(chunk.file), path, chunk, memory, read.span.low * itemsize)

    def _copy(self, reads: Sequence[Read], number: int) -> None:
        for read in reads:
            waiting = self._waiting.pop(self._planner.block(read.span), ())
            if not waiting:
                continue
            chunk, dtype = self._planner.chunk(read.span), self._planner.dtype(read.span)
            memory = self._areas.view(read.rank, number, read.at, self._planner.nbytes(read.span))
            source = Region(chunk.box, chunk.start + read.span.low, chunk.start + read.span.high)
            for index in waiting:
                target = Region.of(self._requests[index].box, self._requests[index].flat)
                if index not in self._values:
                    self._values[index] = np.empty(target.size, dtype.numpy)
                copy_region(self._values[index], target, np.frombuffer(memory, dtype.numpy), source)
                self._left[index] -= 1
                if not self._left[index]:
                    self._finish(index, dtype)

    def _finish(self, index: int, stored: dtypes.DType) -> None:
        request, values = self._requests[index], self._values.pop(index)
        values = cast(values, stored, request.dtype or stored, request.tensor)
        shaped = values if request.flat is not None else values.reshape(request.box.shape)
        self._deliver(index, StoredArray(shaped, request.dtype or stored))

    def _deliver_empty(self) -> None:
        empty = [index for index, left in enumerate(self._left) if left == 0]
        requests = [self._requests[index] for index in empty]
        _read_alone(self._planner.checkpoint, requests, lambda at, values: self._deliver(empty[at], values))


@contextmanager
def share_errors(peers: Peers) -> Iterator[None]:
    """Waits at the end of the block for all ranks; if one rank raises a TkError or OSError, all ranks raise it.

    Of several errors, one that is no damage is raised: a step counts as damaged only if every error reports damage.
    """
    mine: TkError | None = None
    try:
        yield
    except TkError as error:
        mine = error
    except OSError as error:
        mine = StorageError(str(error), error.errno)
        mine.__cause__ = error
    packed = json.dumps(pack(mine)).encode() if mine else b""
    found = [unpack(json.loads(theirs)) for theirs in peers.gather(packed) if theirs]
    if found:
        raise min(found, key=lambda error: isinstance(error, DamagedCheckpoint)) from mine
