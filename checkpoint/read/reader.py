"""Reading a checkpoint of either kind: open, look, read any box of any tensor and slot, every byte checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from isal.isal_zlib import crc32

from ...core import dtypes
from ...core.casts import Array, cast
from ...core.dtypes import DType
from ...core.errors import CheckpointError, NotCommitted, ShapeMismatch, ShardCorrupt, ShardMissing
from ...core.geometry import Box
from ...core.layout import Layout
from ...core.tensors import TensorSpec
from ..files import lookup, small_files, storage
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.chunk import BLOCK, Chunk, Part
from ..format.chunk_index import ChunkIndex
from ..format.manifest import COMMIT, MANIFEST, MAX_MANIFEST, FileDigest, Manifest, StoredTensor
from ..format.region import Region, as_bytes, copy_region, shared_span
from ..format.step_names import check_step_name
from . import hugging_face as hf
from .stored_parts import StoredChunks, StoredParts, read_known

if TYPE_CHECKING:
    import torch

    from .verify import VerifyReport


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Values as stored: `dtype` says what they are, also where numpy has no such dtype (bf16, fp8)."""

    values: Array
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents; 1-D for a flat range."""
        return self.values.shape

    def numpy(self) -> Array:
        """The values; formats that numpy lacks as bit patterns in unsigned integers (bf16: uint16)."""
        return self.values

    def torch(self) -> "torch.Tensor":
        """The values as a tensor of the true dtype, sharing memory."""
        import torch

        if np.dtype(self.dtype.numpy).name == self.dtype.torch:
            return torch.from_numpy(self.values)
        bits = np.dtype(f"i{self.dtype.itemsize}")
        return torch.from_numpy(self.values.view(bits)).view(getattr(torch, self.dtype.torch))


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint; only metadata is held.

        checkpoint = Checkpoint.open("runs/demo")                       # or a step, or a Hugging Face folder
        checkpoint.tensors["model.norm.weight"].shape
        checkpoint.read("model.norm.weight").numpy()
        rows = Box.from_bounds([[0, 128], [0, 512]])                    # tk.core.geometry
        checkpoint.read("lm_head.weight", rows, dtype=FP32).torch()     # from masters where there are any
        assert checkpoint.verify().ok

    Attributes:
        path: the step folder or Hugging Face folder.
        tensors: by logical name, tied names too; each with `.shape` and `.slots` (slot -> dtype code).
        chunks: (tensor, slot) -> where its bytes are.
        manifest: None for a Hugging Face folder.
        manifest_sha256: the checkpoint's identity; of the index (or the only file's header) for a Hugging Face folder.
        skipped: why newer steps of the run folder were passed over.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    chunks: ChunkIndex
    manifest: Manifest | None
    manifest_sha256: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @staticmethod
    def open(path: str | Path) -> "Checkpoint":
        """Opens a step folder, the newest good step of a run folder, or a Hugging Face folder.

        Of a step folder, COMMIT and manifest are checked now, and parts, sizes and cover of a tensor when it is first
        asked for, so that one tensor of a large checkpoint opens few files; `check` does it for all. A step of a run
        folder is chosen only after `check`.

        Raises:
            CheckpointError: there is nothing usable; the message says why for each step looked at.
        """
        from .locate import open_any

        return open_any(Path(path))

    @staticmethod
    def open_step(folder: Path, skipped: tuple[str, ...] = (), lazy: bool = False) -> "Checkpoint":
        """Opens a step folder: COMMIT, manifest, parts, sizes and cover are checked, tensor data is not read.

        Args:
            lazy: check only COMMIT and manifest now, and the rest for each tensor when it is first asked for.

        Raises:
            DamagedCheckpoint: what is there is not what a save wrote.
            CheckpointError: it is whole, and is not the step that its name says or of a version that this tk reads.
            StorageError: a file cannot be opened or read.
        """
        manifest, digest = _committed_manifest(folder)
        check_step_name(folder, manifest.step)
        parts = StoredParts(folder, manifest)
        chunks = StoredChunks(manifest, parts)
        tensors = dict(manifest.tensors) | {alias: manifest.tensors[name] for alias, name in manifest.aliases.items()}
        found = Checkpoint(folder, tensors, manifest.aliases, chunks, manifest, digest, parts, skipped)
        if not lazy:
            found.check()
        return found

    @staticmethod
    def open_hugging_face(folder: Path) -> "Checkpoint":
        """Opens a Hugging Face folder."""
        found = hf.open_folder(folder)
        tensors = found.tensors | {alias: found.tensors[name] for alias, name in found.aliases.items()}
        return Checkpoint(folder, tensors, found.aliases, found.chunks, None, found.digest)

    @property
    def step(self) -> int:
        """The training step; 0 for a Hugging Face folder."""
        return self.manifest.step if self.manifest else 0

    @property
    def layout(self) -> Layout:
        """The layout it was saved at."""
        return self.manifest.layout if self.manifest else Layout()

    @property
    def resume(self) -> Mapping[str, Any]:
        """The run's state beside tensors, as `train/` saved it; empty where there is none."""
        return self.manifest.resume if self.manifest else {}

    @property
    def param_groups(self) -> tuple[Mapping[str, Any], ...]:
        """The optimizer's groups, each with "params", a list of names."""
        return self.manifest.param_groups if self.manifest else ()

    @property
    def table(self) -> tuple[TensorSpec, ...]:
        """The stored tensors; without split rules for a Hugging Face folder."""
        if self.manifest:
            return self.manifest.table
        return tuple(TensorSpec(name, self.tensors[name].shape) for name, _ in self.chunks)

    def config(self) -> dict[str, Any]:
        """The content of config.json.

        Raises:
            ShardMissing: the folder has none.
        """
        names = [hf.CONFIG] if self.manifest is None else [name for name in self.manifest.files if name == hf.CONFIG]
        data = self.side_files(names).get(hf.CONFIG)
        if data is None:
            raise ShardMissing(f"{self.path} has no {hf.CONFIG}.")
        return strict.mapping(strict.parse(data, hf.CONFIG), str(self.path / hf.CONFIG))

    def side_files(self, names: Sequence[str] | None = None) -> dict[str, bytes]:
        """Config, tokenizer and such (all if None are named), checked against the manifest where there is one."""
        if self.manifest is None:
            return hf.read_side_files(self.path, names)
        wanted = {name: self.manifest.files[name] for name in names or self.manifest.files}
        return {name: read_known(self.path, name, digest, hf.MAX_SIDE_FILE) for name, digest in wanted.items()}

    def read(
        self,
        name: str,
        box: Box | None = None,
        slot: str = "weight",
        flat: tuple[int, int] | None = None,
        dtype: DType | None = None,
    ) -> StoredArray:
        """Reads part of a tensor. Every 16 MiB block that is touched is read whole and checked, if it has a checksum.

        Args:
            name: logical name; a tied name reads the tensor it is tied to.
            box: which elements; None = all.
            slot: "weight" or one of the optimizer's.
            flat: [a, b) of the row-major order of the box, given as a 1-D array.
            dtype: what to cast to. Another dtype of slot "weight" than the stored one is cast from "master" where
                there is one.

        Raises:
            ShardMissing: no such tensor or slot.
            ShardCorrupt: a checksum does not match; names tensor, file and block.
            ShapeMismatch: the box or the range is outside the tensor.
        """
        name, slot, stored = self.resolve(name, slot, dtype)
        shape = self.tensors[name].shape
        box = Box.whole(shape) if box is None else box
        region = Region.of(box, flat)
        inside = len(box.shape) == len(shape) and Box.whole(shape).contains(box)
        if not inside or not 0 <= region.start <= region.stop <= box.size:
            raise ShapeMismatch(f"{name} has shape {list(shape)}; box {box.bounds()}, range {flat} is not in it.")
        values = np.empty(region.size, stored.numpy)
        for chunk in self.chunks[name, slot].find(region):
            self._read_chunk(chunk, stored, region, values)
        values = cast(values, stored, dtype or stored, name)
        return StoredArray(values if flat is not None else values.reshape(box.shape), dtype or stored)

    def resolve(self, name: str, slot: str, dtype: DType | None) -> tuple[str, str, DType]:
        """The stored tensor, slot and dtype that a read comes from."""
        name = self.aliases.get(name, name)
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ShardMissing(f"{self.path} has no tensor {name!r}.")
        if slot == "weight" and dtype and "master" in tensor.slots and dtype.code != tensor.slots["weight"]:
            slot = "master"
        if slot not in tensor.slots:
            raise ShardMissing(f"{self.path} has no slot {slot!r} of {name}; it has {', '.join(tensor.slots)}.")
        return name, slot, dtypes.by_code(tensor.slots[slot])

    def data_path(self, file: str) -> Path:
        """The path of one of the checkpoint's data files."""
        return real_path(self.path, strict.file_name(file, str(self.path)), inside=self.manifest is None)

    def open_data(self, file: str) -> int:
        """A descriptor of one of the data files; ShardCorrupt if its header is not the one that was written."""
        if isinstance(self.parts, StoredParts):
            return self.parts.open_data(file)
        return storage.open_read(self.data_path(file))

    @property
    def opened_parts(self) -> tuple[str, ...]:
        """Names of the parts that have been read so far."""
        return self.parts.opened if isinstance(self.parts, StoredParts) else ()

    def check(self) -> None:
        """Reads all metadata: every part, the sizes of all files, and that each slot of each tensor is held once.

        Raises:
            CheckpointError: something is missing, damaged or contradicts itself; the message names it.
        """
        if isinstance(self.chunks, StoredChunks):
            self.chunks.check()

    def verify(self, on_bytes: Callable[[int], None] = lambda _: None) -> "VerifyReport":
        """Reads and checks every byte, and looks for files that are none of its own; `on_bytes` is told as it goes."""
        from ..run.strangers import find_strangers
        from .verify import verify

        report = verify(self, on_bytes)
        problems, notes = find_strangers(self)
        return replace(report, problems=(*report.problems, *problems), notes=tuple(notes))

    def _read_chunk(self, chunk: Chunk, dtype: DType, target: Region, values: Array) -> None:
        """Copies what `target` shares with a chunk into `values`, block by block."""
        spans = touched(chunk, target, dtype.itemsize)
        if not spans:
            return
        same_box = chunk.box == target.box
        with storage.closing(self.open_data(chunk.file)) as fd:
            for low, high in spans:
                piece = Region(chunk.box, chunk.start + low, chunk.start + high)
                direct = same_box and target.start <= piece.start and piece.stop <= target.stop
                at = piece.start - target.start
                memory = values[at : at + piece.size] if direct else np.empty(piece.size, dtype.numpy)
                self.read_span(fd, chunk, as_bytes(memory), low * dtype.itemsize)
                if not direct:
                    copy_region(values, target, memory, piece)

    def read_span(self, fd: int, chunk: Chunk, memory: memoryview, start: int) -> None:
        """Fills `memory` from byte `start` of a chunk; where there are checksums it must be one of its whole blocks.

        Raises:
            ShardCorrupt: the checksum does not match, or the file ends before.
        """
        path = self.path / chunk.file  # for messages: links were followed when the file was opened
        storage.read_exact(fd, memory, chunk.offset + start, path)
        if chunk.crc is not None and crc32(memory) != chunk.crc[start // BLOCK]:
            raise corrupt(path, chunk, start // BLOCK)


def touched(chunk: Chunk, target: Region, itemsize: int) -> list[tuple[int, int]]:
    """What has to be read of a chunk for `target`: [low, high) of its elements, each within one block.

    Whole blocks, so that each can be checked; where there are no checksums, no more than from the first element that
    is shared to the last.
    """
    span = shared_span(chunk.region, target)
    if span is None:
        return []
    per_block, size = BLOCK // itemsize, chunk.stop - chunk.start
    found = []
    for block in range((span[0] - chunk.start) // per_block, -(-(span[1] - chunk.start) // per_block)):
        low, high = block * per_block, min((block + 1) * per_block, size)
        inside = shared_span(Region(chunk.box, chunk.start + low, chunk.start + high), target)
        if inside and chunk.crc is None:
            found.append((inside[0] - chunk.start, inside[1] - chunk.start))
        elif inside:
            found.append((low, high))
    return found


def corrupt(path: Path, chunk: Chunk, block: int) -> ShardCorrupt:
    """The error for a block whose bytes are not those that were written."""
    start = chunk.offset + block * BLOCK
    return ShardCorrupt(
        f"{path}: block {block} of {chunk.tensor}, slot {chunk.slot} (bytes {start} to "
        f"{min(start + BLOCK, chunk.offset + chunk.nbytes)}) does not match its checksum; restore the file from a copy "
        f"or use another step."
    )


def _committed_manifest(folder: Path) -> tuple[Manifest, str]:
    if not lookup.exists(folder / COMMIT):
        if lookup.exists(folder) and not lookup.is_dir(folder):
            raise CheckpointError(f"{folder} is not a folder, as a step is.")
        raise NotCommitted(f"{folder} has no {COMMIT}: its save never finished.")
    wanted = small_files.read_small(real_path(folder, COMMIT), 4096)
    data = small_files.read_small(real_path(folder, MANIFEST), MAX_MANIFEST)
    digest = FileDigest.of(data).sha256
    if wanted != f"{digest}\n".encode():
        raise NotCommitted(f"{folder / MANIFEST} does not match {COMMIT}: it is damaged or belongs to another save.")
    return Manifest.parse(data, str(folder / MANIFEST)), digest
