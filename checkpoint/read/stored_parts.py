"""A step's parts and chunks, read when first asked for: whoever wants one tensor opens the parts that hold it."""

import gc
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

from ...core import dtypes
from ...core.errors import ManifestError, ShardCorrupt
from ..files import small_files, storage
from ..files.links import real_path
from ..format.chunk import Chunk, DataFile, Part
from ..format.chunk_index import TensorChunks, add_part
from ..format.manifest import MAX_PART, PARTS, FileDigest, Manifest
from ..format.safetensors_file import MAX_HEADER


class StoredParts(Mapping[str, Part]):
    """Parts by file name; each is checked against the manifest, and its files for their sizes, when it is read.

    Raises (on access):
        ShardMissing, ShardCorrupt: the part or one of its files is missing or not the one that was saved.
        ManifestError: the part breaks a rule.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._names = sorted(manifest.tensors)
        self._read: dict[str, Part] = {}
        self._unchecked: dict[str, DataFile] = {}  # by name, those whose header nobody has looked at

    def __getitem__(self, name: str) -> Part:
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.parts)

    def __len__(self) -> int:
        return len(self._manifest.parts)

    @property
    def opened(self) -> tuple[str, ...]:
        """Names of those read so far."""
        return tuple(self._read)

    def open_data(self, name: str) -> int:
        """A descriptor of a data file of a part that has been read; its header is checked the first time.

        Raises:
            ShardCorrupt: the header is not the one that was written.
        """
        path = real_path(self._folder, name)
        fd = storage.open_read(path)
        try:
            if name in self._unchecked:
                _check_header(fd, path, self._unchecked[name])
                self._unchecked.pop(name, None)
        except BaseException:
            storage.close(fd)
            raise
        return fd

    def _load(self, name: str) -> Part:
        path, record = self._folder / PARTS / name, self._manifest.parts[name]
        part = Part.parse(read_known(path.parent, name, record.digest, MAX_PART), str(path))
        listed = {self._names[index] for index in record.tensors}
        unlisted = {chunk.tensor for chunk in part.chunks} - listed
        if unlisted:
            raise ManifestError(f"{path} holds {min(unlisted)}, which the manifest does not list for it.")
        check_sizes(self._folder, {name: part})
        self._unchecked.update(part.files)
        return part


class StoredChunks(Mapping[tuple[str, str], TensorChunks]):
    """Chunks by (tensor, slot); the first access to a tensor reads its parts and checks that they hold it exactly once.

    Raises (on access): as `StoredParts`, and ManifestError where a slot is not held exactly once.
    """

    def __init__(self, manifest: Manifest, parts: Mapping[str, Part]) -> None:
        self._tensors, self._parts = manifest.tensors, parts
        self._holders: dict[str, list[str]] = {name: [] for name in manifest.tensors}
        names = sorted(manifest.tensors)
        for part, record in manifest.parts.items():
            for index in record.tensors:
                self._holders[names[index]].append(part)
        self._found: dict[tuple[str, str], list[Chunk]] = {key: [] for key in self}
        self._owner: dict[str, int] = {}
        self._taken: set[str] = set()
        self._ready: dict[tuple[str, str], TensorChunks] = {}
        self._lock = RLock()

    def __getitem__(self, key: tuple[str, str]) -> TensorChunks:
        with self._lock:
            if key not in self._ready:
                self._ready[key] = self._build(*key)
            return self._ready[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((name, slot) for name, tensor in self._tensors.items() for slot in tensor.slots)

    def __len__(self) -> int:
        return sum(len(tensor.slots) for tensor in self._tensors.values())

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def check(self) -> None:
        """Reads every part and checks that every slot of every tensor is held exactly once."""
        with self._lock, _no_garbage_collection():
            for part in self._parts:
                self._take(part)
            for key in self:
                self[key]

    def _build(self, name: str, slot: str) -> TensorChunks:
        tensor = self._tensors[name]
        dtype = dtypes.by_code(tensor.slots[slot])
        for part in self._holders[name]:
            self._take(part)
        return TensorChunks(f"{name}, slot {slot}", self._found[name, slot], tensor.shape, dtype)

    def _take(self, part: str) -> None:
        if part not in self._taken:
            add_part(self._parts[part], self._found, self._owner)
            self._taken.add(part)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small objects without a cycle among them: looking for cycles costs a quarter of reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_known(folder: Path, name: str, known: FileDigest, max_bytes: int) -> bytes:
    """A small file whose size and SHA-256 are on record; ShardCorrupt if it has changed."""
    path = real_path(folder, name)
    data = small_files.read_small(path, max_bytes)
    if FileDigest.of(data) != known:
        raise not_as_saved(path)
    return data


def not_as_saved(path: Path) -> ShardCorrupt:
    """The error for a small file that has changed."""
    return ShardCorrupt(f"{path} is not the file that was saved: its SHA-256 differs from the manifest's.")


def _check_header(fd: int, path: Path, known: DataFile) -> None:
    raw = bytearray(8)
    storage.read_exact(fd, memoryview(raw), 0, path)
    length = int.from_bytes(raw, "little")
    text = bytearray(min(length, known.size, MAX_HEADER))
    storage.pread(fd, memoryview(text), 8)
    if hashlib.sha256(raw + text).hexdigest() != known.header_sha256:
        raise ShardCorrupt(f"{path}: its header is not the one that was written; restore it or use another step.")


def check_sizes(folder: Path, parts: Mapping[str, Part]) -> None:
    """Every data file is there with its recorded size."""
    for part in parts.values():
        for name, known in part.files.items():
            with storage.reading(real_path(folder, name)) as fd:
                size = storage.file_size(fd)
            if size != known.size:
                raise ShardCorrupt(f"{folder / name} has {size} bytes; {known.size} were written.")
