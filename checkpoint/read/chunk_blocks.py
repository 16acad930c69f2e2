"""Reading stored chunks block by block: which blocks a read touches, and each one checked."""

from pathlib import Path

from isal.isal_zlib import crc32

from ...core.errors import ShardCorrupt
from ...core.integers import ceil_div
from ..files import storage
from ..format.chunk import BLOCK, Chunk
from ..format.region import Region, shared_span


def spans_to_read(chunk: Chunk, target: Region, itemsize: int) -> list[tuple[int, int]]:
    """What has to be read of a chunk for `target`: [low, high) of its elements, each within one block.

    Whole blocks, so that each can be checked; where there are no checksums, no more than from the first element that
    is shared to the last.
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
    """Fills `memory` from byte `start` of a chunk; where there are checksums it must be one of its whole blocks.

    Args:
        fd: the chunk's file, open; `path` is for messages, links in it need not be followed again.
        once: see `storage.pread`.

    Raises:
        ShardCorrupt: the checksum does not match, or the file ends before.
    """
    storage.read_exact(fd, memory, chunk.offset + start, path, once)
    if chunk.crc is not None and crc32(memory) != chunk.crc[start // BLOCK]:
        raise corrupt_block(path, chunk, start // BLOCK)


def corrupt_block(path: Path, chunk: Chunk, block: int) -> ShardCorrupt:
    """The error for a block whose bytes are not those that were written."""
    start = chunk.offset + block * BLOCK
    return ShardCorrupt(
        f"{path}: block {block} of {chunk.tensor}, slot {chunk.slot} (bytes {start} to "
        f"{min(start + BLOCK, chunk.offset + chunk.nbytes)}) does not match its checksum; restore the file from a copy "
        f"or use another step."
    )
