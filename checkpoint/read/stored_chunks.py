"""The chunks of a step by tensor and slot: the parts of a tensor are read when it is first used."""

from collections.abc import Iterator, Mapping
from threading import RLock

from ...core import dtypes
from ...core.garbage import no_garbage_collection
from ..format.chunk import Chunk, Part
from ..format.chunk_index import TensorChunks, add_part
from ..format.manifest import Manifest


class StoredChunks(Mapping[tuple[str, str], TensorChunks]):
    """Chunks by (tensor, slot); the first access to a tensor reads its parts and checks that they hold it exactly once.

    Raises (on access): the errors of `StoredParts`, and ManifestError if the chunks do not hold a slot exactly once.
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
        with self._lock, no_garbage_collection():
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
