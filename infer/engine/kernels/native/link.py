"""The memory that the ranks of a model share: their partial sums, their logits, and the tokens that they sample.

It is anonymous, so the kernel frees it when the ranks end in any way. While the ranks start, they exchange a few bytes
through files in the engine's temporary folder.
"""

import json
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from .....checkpoint.read.shared_read import Peers
from .....core.casts import Array
from .....core.integers import round_up
from .binding.memory import CACHE_LINE
from .binding.structures import MAX_RANKS, Buffer, NativeModel

_POLL: Final = 0.0005  # seconds


class FileGather:
    """The exchange of a few bytes between ranks: each writes a file per exchange and waits for those of the others.

    If a rank dies, the engine ends the others, which wait.

    Args:
        store: the start of the files' paths, the same on every rank.
        rank, size: this rank, and the number of ranks.
    """

    def __init__(self, store: str, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._exchanges = 0

    def __call__(self, mine: bytes) -> list[bytes]:
        """Returns the bytes of all ranks in rank order; every rank calls it equally often."""
        paths = [Path(f"{self._store}.{self._exchanges}.{rank}") for rank in range(self._size)]
        self._exchanges += 1
        partial = Path(f"{paths[self._rank]}.part")
        partial.write_bytes(mine)
        partial.rename(paths[self._rank])
        for path in paths:
            while not path.exists():
                time.sleep(_POLL)
        return [path.read_bytes() for path in paths]


@dataclass(frozen=True)
class SharedMemory:
    """The memory of one model's ranks, of which each has its own mapping.

    Attributes:
        arrived: counters of meetings, a cache line per rank.
        slots: fp32 [2, tp, slot], the partial sums of every rank, in two areas that are used in turn.
        logits: fp32, the wanted rows of all ranks.
        results: uint8, the samples of all ranks.
    """

    arrived: Array
    slots: Array
    logits: Array
    results: Array

    @staticmethod
    def open(peers: Peers, slot_floats: int, logits_floats: int, num_results: int) -> "SharedMemory":
        """Maps the memory, which rank 0 makes; every rank calls it with the same sizes.

        Args:
            peers: the ranks of the model.
            slot_floats: the number of floats of a rank's partial sums.
            logits_floats: the number of floats of the logits of all ranks.
            num_results: the number of bytes of the results.
        """
        assert peers.size <= MAX_RANKS
        sizes = (peers.size * CACHE_LINE, 2 * peers.size * slot_floats * 4, logits_floats * 4, num_results)
        starts = np.cumsum([0, *(round_up(size, mmap.PAGESIZE) for size in sizes)]).tolist()
        own = os.memfd_create("tk-link", os.MFD_CLOEXEC) if peers.rank == 0 else -1
        if own >= 0:
            os.ftruncate(own, starts[-1])
        pid, descriptor = json.loads(peers.gather(json.dumps([os.getpid(), own]).encode())[0])
        mapped = own if own >= 0 else os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        area = np.frombuffer(mmap.mmap(mapped, starts[-1]), np.uint8)
        peers.gather(b"mapped")  # before rank 0 closes its descriptor
        os.close(mapped)
        parts = [area[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        slots = parts[1].view(np.float32).reshape(2, peers.size, slot_floats)
        return SharedMemory(parts[0], slots, parts[2].view(np.float32), parts[3])

    def fill(self, model: NativeModel) -> None:
        """Points a model's link to this memory."""
        model.link.arrived, model.link.slots = self.arrived.ctypes.data, self.slots.ctypes.data
        model.link.slot_floats = self.slots.shape[-1]
        model.buffers[Buffer.PARTIAL] = self.slots[0, model.rank].ctypes.data  # and then that of each exchange
