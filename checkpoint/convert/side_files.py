"""The small files beside the weights: chosen and checked before a copy begins, then copied in bounded memory."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...core.dtypes import DType
from ...core.errors import CheckpointError, ManifestError
from ..files import folders, storage
from ..files.file_watch import changed_while_read
from ..files.lfs_pointers import refuse_open_pointer
from ..files.links import stands_for_copy
from ..files.storage import FileState
from ..format.manifest import FileDigest
from ..read import hugging_face as hf
from ..read.known_files import edited_file
from ..read.reader import Checkpoint

_PIECE: Final = 2**20  # bytes
# `transformers` 5 reads the first one and then the second, older ones the second.
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class SideFile:
    """A side file of a copy.

    Attributes:
        name: the file's name.
        size: the file's size in bytes.
        content: the path of the source file, or the new content.
        known: the digest in the source's manifest; None if it has none.
        state: the state of the source file, if it has no digest.
    """

    name: str
    size: int
    content: Path | bytes
    known: FileDigest | None = None
    state: FileState | None = None


def plan_side_files(source: Checkpoint, dtype: DType | None = None) -> tuple[SideFile, ...]:
    """Returns the source's config, tokenizer and other side files; config.json names the new dtype, if one is given.

    Raises:
        ManifestError: a file has a name that a checkpoint cannot store, or is too large.
        CheckpointError: a file is missing, is no regular file, has changed since it was saved, or is a link to a file
            of another name and without a digest.
    """
    known, paths = source.folder.sealed_files, source.folder.side_paths()
    for name, path in paths.items():
        if name not in known and not stands_for_copy(source.path / name, path):
            raise CheckpointError(
                f"{source.path / name} is a link to {path}, a file of another name, which may be anything on this "
                "machine, so it is not copied. Put the file itself there, or remove the link."
            )
    files = [_look_at(name, path, known.get(name)) for name, path in paths.items() if name != hf.INDEX]
    if dtype is None:
        return tuple(files)
    return tuple(_with_dtype(source, dtype) if file.name == hf.CONFIG else file for file in files)


def copy_side_files(files: Sequence[SideFile], folder: Path) -> dict[str, FileDigest]:
    """Copies the files into `folder`, durably; CheckpointError if one has changed since it was saved."""
    written = {}
    for name, file in sorted((file.name, file) for file in files):
        folders.make_dirs((folder / name).parent)
        written[name] = _copy(file, folder / name)
    for inner in {(folder / name).parent for name in written} - {folder}:
        folders.fsync_dir(inner)
    return written


def _look_at(name: str, path: Path, known: FileDigest | None) -> SideFile:
    with storage.reading(path) as fd:
        state = storage.file_state(fd)
        size = state.size
        refuse_open_pointer(path, fd)
    if known is not None and size != known.size:
        raise edited_file(path)
    if size > hf.MAX_SIDE_FILE:
        raise ManifestError(f"{path} has {size} bytes; at most {hf.MAX_SIDE_FILE} are accepted.")
    return SideFile(name, size, path, known, None if known else state)


def _with_dtype(source: Checkpoint, dtype: DType) -> SideFile:
    config = source.config()
    if not any(key in config for key in _DTYPE_KEYS):
        config["dtype"] = ""
    _set_dtype(config, dtype.torch)
    data = json.dumps(config, indent=2).encode()
    return SideFile(hf.CONFIG, len(data), data)


def _set_dtype(config: dict[str, Any], name: str) -> None:
    """Sets the dtype wherever a config, or the config of a part of the model, has one."""
    for key, value in config.items():
        if key in _DTYPE_KEYS:
            config[key] = name
        elif isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            _set_dtype(value, name)


def _copy(file: SideFile, target: Path) -> FileDigest:
    digest, size = hashlib.sha256(), 0
    with storage.closing(storage.open_new(target)) as fd:
        for data in _pieces(file.content):
            storage.pwrite(fd, data, size)
            digest.update(data)
            size += len(data)
        storage.fsync(fd)
    if isinstance(file.content, Path) and file.state not in (None, storage.state_of(file.content)):
        raise changed_while_read(file.content)
    written = FileDigest(size, digest.hexdigest())
    if file.known not in (None, written):
        raise edited_file(target if isinstance(file.content, bytes) else file.content)
    return written


def _pieces(content: Path | bytes) -> Iterator[memoryview]:
    if isinstance(content, bytes):
        yield memoryview(content)
        return
    buffer = memoryview(bytearray(_PIECE))
    with storage.reading(content) as fd:
        at = 0
        while count := storage.pread(fd, buffer, at):
            yield buffer[:count]
            at += count
