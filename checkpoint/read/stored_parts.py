"""The parts of a step, each read on first access: a reader of one tensor opens only the parts that hold it."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...core.errors import ManifestError, ShardCorrupt
from ..files import storage
from ..files.links import real_path
from ..format.chunk import DataFile, Part
from ..format.manifest import MAX_PART, PARTS, Manifest
from ..format.safetensors_file import MAX_HEADER
from .known_files import check_sizes, read_part


class StoredParts(Mapping[str, Part]):
    """Parts by file name; on reading, each is checked against the manifest, and the sizes of its files are checked.

    Raises (on access):
        ShardMissing, ShardCorrupt: the part or one of its files is missing or has changed since it was saved.
        ManifestError: the part breaks a rule.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._names = sorted(manifest.tensors)
        self._read: dict[str, Part] = {}
        self._unchecked: dict[str, DataFile] = {}  # by name, the files whose headers are not checked yet

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
        """The names of the parts that have been read."""
        return tuple(self._read)

    def open_data(self, name: str) -> int:
        """Opens a data file of a part that has been read; checks its header the first time.

        Raises:
            ShardCorrupt: the header has changed since it was written.
        """
        path = real_path(self._folder, name)
        fd = storage.open_read(path)
        try:
            unchecked = self._unchecked.get(name)
            if unchecked is not None:
                _check_header(fd, path, unchecked)
                self._unchecked.pop(name, None)
        except BaseException:
            storage.close(fd)
            raise
        return fd

    def check_headers(self) -> None:
        """Compares the headers of the files of all parts that have been read; raises as `open_data`."""
        for name in list(self._unchecked):
            storage.close(self.open_data(name))

    def _load(self, name: str) -> Part:
        path, record = self._folder / PARTS / name, self._manifest.parts[name]
        part = Part.parse(read_part(path.parent, name, record.digest, MAX_PART), str(path))
        listed = {self._names[index] for index in record.tensors}
        unlisted = {chunk.tensor for chunk in part.chunks} - listed
        if unlisted:
            raise ManifestError(f"{path} holds {min(unlisted)}, which the manifest does not list for it.")
        check_sizes(self._folder, {name: part})
        self._unchecked.update(part.files)
        return part


def _check_header(fd: int, path: Path, known: DataFile) -> None:
    raw = bytearray(8)
    storage.read_exact(fd, memoryview(raw), 0, path)
    length = int.from_bytes(raw, "little")
    text = bytearray(min(length, known.size, MAX_HEADER))
    storage.pread(fd, memoryview(text), 8)
    if hashlib.sha256(raw + text).hexdigest() != known.header_sha256:
        raise ShardCorrupt(
            f"{path}: its header is not the one that was written. Restore the file, or use another step."
        )
