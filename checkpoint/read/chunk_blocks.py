"""Reads of stored chunks block by block: the blocks that a read touches, and the check of each."""

from pathlib import Path

from isal.isal_zlib import crc32

from ...core.errors import ShardCorrupt
from ...core.integers import ceil_div
from ..files import storage
from ..format.chunk import BLOCK, Chunk
from ..format.region import Region, shared_span


def spans_to_read(chunk: Chunk, target: Region, itemsize: int) -> list[tuple[int, int]]:
    """Returns the ranges [low, high) of a chunk's elements to read for `target`, each within one block.

    A range is a whole block, so that its checksum can be checked; without checksums it ends at the first and the last
    element that the block shares with `target`.
    """
    span = shared_span(chunk.region, target)
    if span is None:
        return []
    per_block, size = BLOCK // itemsize, chunk.stop - chunk.start
    found = []
    for block in range((span[0] - chunk.start) // per_block, ceil_div(span[1] - chunk.start, per_block)):
        low, high = block * per_block, min((block + 1) * per_block, size)
        inside = shared_span(Region(chunk.box, chunk.start + low, chunk.start + high), target)
        if inside and chunk.crc is None:
            found.append((inside[0] - chunk.start, inside[1] - chunk.start))
        elif inside:
            found.append((low, high))
    return found


def read_span(fd: int, path: Path, chunk: Chunk, memory: memoryview, start: int, once: bool = False) -> None:
    """Fills `memory` from byte `start` of a chunk; if the chunk has checksums, `memory` must be a whole block of it.

    Args:
        fd: a descriptor of the chunk's file.
        path: the file's path, for messages.
        chunk: the chunk to read.
        memory: the bytes to fill.
        start: the first byte to read, counted from the chunk's first byte.
        once: see `storage.pread`.

    Raises:
        ShardCorrupt: the checksum does not match, or the file ends too early.
    """
    storage.read_exact(fd, memory, chunk.offset + start, path, once)
    if chunk.crc is not None and crc32(memory) != chunk.crc[start // BLOCK]:
        raise corrupt_block(path, chunk, start // BLOCK)


def corrupt_block(path: Path, chunk: Chunk, block: int) -> ShardCorrupt:
    """Makes the error for a block whose bytes have changed since they were written."""
    start = chunk.offset + block * BLOCK
    return ShardCorrupt(
        f"{path}: block {block} of {chunk.tensor}, slot {chunk.slot} (bytes {start} to "
        f"{min(start + BLOCK, chunk.offset + chunk.nbytes)}) does not match its checksum. Restore the file from a "
        f"backup, or use another step."
    )
