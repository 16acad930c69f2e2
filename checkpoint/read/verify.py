"""The check of every byte of a checkpoint against the checksums recorded when it was written."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, local
from typing import Final

import numpy as np

from ...core.casts import Array
from ...core.errors import CheckpointError, StorageError
from ...core.integers import ceil_div
from ..files import storage
from ..format.chunk import BLOCK, Chunk
from ..format.region import as_bytes
from .checkpoint_folder import CheckpointFolder
from .chunk_blocks import read_span
from .hugging_face import MAX_SIDE_FILE
from .known_files import read_side_file
from .report import Problem, VerifyReport
from .verify_headers import check_headers, check_index

NUM_THREADS: Final = 3  # on two cores: one waits for the disk while two compute checksums


def verify(folder: CheckpointFolder, on_bytes: Callable[[int], None] = lambda _: None) -> VerifyReport:
    """Reads and checks every byte that has a checksum; opening the folder has checked COMMIT and manifest already.

    Args:
        folder: the open checkpoint.
        on_bytes: called with the number of bytes of each block once it is checked, by one thread at a time.

    Raises:
        CheckpointError: parts, sizes or chunks are wrong, so it is unknown which bytes to check.
    """
    folder.check()
    problems = [*_check_side_files(folder), *check_headers(folder), *check_index(folder)]
    chunks = [chunk for part in folder.parts.values() for chunk in part.chunks]
    problems += _check_blocks(folder, chunks, on_bytes)
    return VerifyReport(
        path=folder.path,
        step=folder.manifest.step,
        has_checksums=folder.has_checksums,
        num_files=len(folder.file_sizes()),
        num_bytes=sum(chunk.nbytes for chunk in chunks),
        problems=tuple(problems),
    )


def _check_side_files(folder: CheckpointFolder) -> Iterator[Problem]:
    for name, known in folder.sealed_files.items():
        try:
            read_side_file(folder.path, name, known, MAX_SIDE_FILE)
        except (CheckpointError, StorageError) as error:
            yield Problem(name, str(error))


def _check_blocks(folder: CheckpointFolder, chunks: list[Chunk], on_bytes: Callable[[int], None]) -> list[Problem]:
    lock = Lock()
    memory = local()

    paths = {file: folder.data_path(file) for file in {chunk.file for chunk in chunks}}

    def check(work: tuple[Chunk, int]) -> Problem | None:
        chunk, block = work
        if not hasattr(memory, "buffer"):
            memory.buffer = np.empty(BLOCK, np.uint8)
        problem = _check_block(paths[chunk.file], chunk, block, memory.buffer)
        with lock:
            on_bytes(min(BLOCK, chunk.nbytes - block * BLOCK))
        return problem

    work = [(chunk, block) for chunk in chunks for block in range(ceil_div(chunk.nbytes, BLOCK))]
    with ThreadPoolExecutor(NUM_THREADS, "tk-verify") as pool:
        return [problem for problem in pool.map(check, work) if problem]


def _check_block(path: Path, chunk: Chunk, block: int, buffer: Array) -> Problem | None:
    data = as_bytes(buffer)[: min(BLOCK, chunk.nbytes - block * BLOCK)]
    try:
        with storage.reading(path) as fd:
            read_span(fd, path, chunk, data, block * BLOCK, once=True)
    except (CheckpointError, StorageError) as error:
        return Problem(chunk.file, str(error), chunk.tensor, chunk.slot, block)
    return None
