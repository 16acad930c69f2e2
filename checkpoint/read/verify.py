"""Checking every byte of a checkpoint against what was recorded when it was written."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock, local
from typing import Any, Final

import numpy as np
from isal.isal_zlib import crc32

from ...core.casts import Array
from ...core.errors import CheckpointError, StorageError
from ..files import storage
from ..files.links import real_path
from ..format.chunk import BLOCK, Chunk, Part
from ..format.region import as_bytes
from ..format.safetensors_file import read_header
from . import hugging_face as hf
from .reader import Checkpoint, corrupt
from .stored_parts import read_known

NUM_THREADS: Final = 3  # on two cores: one waits for the disk while two compute checksums


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; tensor, slot and block are None where the file as a whole is meant."""

    file: str
    message: str
    tensor: str | None = None
    slot: str | None = None
    block: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        has_checksums: False for a Hugging Face folder, of which only headers and sizes can be checked.
        num_bytes: bytes of tensor data read.
        notes: files that are none of the checkpoint's, in words; they do no harm.
    """

    path: Path
    step: int
    has_checksums: bool
    num_files: int
    num_bytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"path": str(self.path), "ok": self.ok}


def verify(
    checkpoint: Checkpoint,
    on_bytes: Callable[[int], None] = lambda _: None,
    leave_out: tuple[str, ...] = (),
) -> VerifyReport:
    """Reads every byte of an open checkpoint; opening has checked COMMIT and manifest already.

    Args:
        on_bytes: told the bytes of each block as it is done, one thread at a time.
        leave_out: slots whose data somebody else reads, and so checks.

    Raises:
        CheckpointError: parts, sizes or cover are wrong, so there is no saying what bytes to look at.
    """
    checkpoint.check()
    if checkpoint.manifest is None:
        num_files = len({chunk.file for chunks in checkpoint.chunks.values() for chunk in chunks})
        return VerifyReport(checkpoint.path, 0, False, num_files, 0, ())
    problems = [*_check_side_files(checkpoint)]
    for part in checkpoint.parts.values():
        problems += _check_headers(checkpoint.path, part)
    chunks = [chunk for part in checkpoint.parts.values() for chunk in part.chunks if chunk.slot not in leave_out]
    problems += _check_blocks(checkpoint, chunks, on_bytes)
    return VerifyReport(
        path=checkpoint.path,
        step=checkpoint.step,
        has_checksums=True,
        num_files=sum(len(part.files) for part in checkpoint.parts.values()),
        num_bytes=sum(chunk.nbytes for chunk in chunks),
        problems=tuple(problems),
    )


def _check_side_files(checkpoint: Checkpoint) -> Iterator[Problem]:
    files = checkpoint.manifest.files if checkpoint.manifest else {}
    for name, known in files.items():
        try:
            read_known(checkpoint.path, name, known, hf.MAX_SIDE_FILE)
        except (CheckpointError, StorageError) as error:
            yield Problem(name, str(error))


def _check_headers(folder: Path, part: Part) -> Iterator[Problem]:
    for name, known in part.files.items():
        try:
            header = read_header(real_path(folder, name))
        except (CheckpointError, StorageError) as error:
            yield Problem(name, str(error))
            continue
        if header.sha256 != known.header_sha256:
            yield Problem(name, f"{folder / name}: its header is not the one that was written.")
        stored = sorted((entry.begin, entry.end) for entry in header.entries.values())
        listed = sorted((c.offset, c.offset + c.nbytes) for c in part.chunks if c.file == name)
        if stored != listed:
            yield Problem(name, f"{folder / name}: its header and its part disagree on where its tensors lie.")


def _check_blocks(checkpoint: Checkpoint, chunks: list[Chunk], on_bytes: Callable[[int], None]) -> list[Problem]:
    lock = Lock()
    memory = local()

    paths = {file: checkpoint.data_path(file) for file in {chunk.file for chunk in chunks}}

    def check(work: tuple[Chunk, int]) -> Problem | None:
        chunk, block = work
        if not hasattr(memory, "buffer"):
            memory.buffer = np.empty(BLOCK, np.uint8)
        problem = _check_block(paths[chunk.file], chunk, block, memory.buffer)
        with lock:
            on_bytes(min(BLOCK, chunk.nbytes - block * BLOCK))
        return problem

    work = [(chunk, block) for chunk in chunks for block in range(-(-chunk.nbytes // BLOCK))]
    with ThreadPoolExecutor(NUM_THREADS, "tk-verify") as pool:
        return [problem for problem in pool.map(check, work) if problem]


def _check_block(path: Path, chunk: Chunk, block: int, buffer: Array) -> Problem | None:
    data = as_bytes(buffer)[: min(BLOCK, chunk.nbytes - block * BLOCK)]
    try:
        with storage.reading(path) as fd:
            storage.read_exact(fd, data, chunk.offset + block * BLOCK, path, once=True)
        if chunk.crc is not None and crc32(data) != chunk.crc[block]:
            raise corrupt(path, chunk, block)
    except (CheckpointError, StorageError) as error:
        return Problem(chunk.file, str(error), chunk.tensor, chunk.slot, block)
    return None
