"""An open checkpoint: its metadata, and reads of any box of any tensor and slot, with every byte checked."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core import dtypes
from ...core.casts import Array, cast
from ...core.dtypes import DType
from ...core.errors import CheckpointError, ShapeMismatch, ShardMissing
from ...core.geometry import Box
from ...core.given_paths import as_path
from ...core.layout import Layout
from ..files import storage
from ..format import json_strict as strict
from ..format.chunk import Chunk
from ..format.region import Region, as_bytes, copy_region
from . import hugging_face as hf
from .checkpoint_folder import CheckpointFolder
from .chunk_blocks import read_span, spans_to_read
from .locate import locate
from .report import VerifyReport
from .step_folder import StepFolder
from .stored_array import StoredArray
from .verify import verify


class Checkpoint:
    """An open checkpoint; only metadata is in memory.

        checkpoint = Checkpoint.open("runs/demo")          # or a step folder, a Hugging Face folder, an adapter of peft
        checkpoint.tensors["model.norm.weight"].shape
        checkpoint.read("model.norm.weight").numpy()
        rows = Box.from_bounds([[0, 128], [0, 512]])                    # tk.core.geometry
        checkpoint.read("lm_head.weight", rows, dtype=FP32).torch()     # from the masters, if any
        assert checkpoint.verify().ok

    Attributes:
        folder: the open folder.
        path: the path of the folder that was opened.
        manifest: the checkpoint's metadata.
        tensors: the tensors by logical name, tied names included; each has `.shape` and `.slots` (slot -> dtype code).
        aliases: tied name -> name of the stored tensor.
        chunks: (tensor, slot) -> the chunks that hold it.
        skipped: the reasons why newer steps of the run folder were passed over.
    """

    def __init__(self, folder: CheckpointFolder, skipped: tuple[str, ...] = ()) -> None:
        self.folder, self.skipped = folder, skipped
        self.path, self.manifest, self.chunks = folder.path, folder.manifest, folder.chunks
        self.aliases, stored = self.manifest.aliases, self.manifest.tensors
        self.tensors = dict(stored) | {alias: stored[name] for alias, name in self.aliases.items()}

    @staticmethod
    def open(path: str | os.PathLike[str]) -> "Checkpoint":
        """Opens a step folder, the newest good step of a run folder, a Hugging Face folder, or an adapter of peft.

        For a step folder, COMMIT and manifest are checked now; the parts, sizes and chunks of a tensor are checked when
        it is first used, so that reading one tensor of a large checkpoint opens few files. `check` checks all of them.
        A step of a run folder is chosen only after `check`.

        Raises:
            CheckpointError: no checkpoint is usable; the message gives the reason for each step.
            ConfigError: the path is empty.
        """
        return Checkpoint(*locate(as_path(path)))

    @staticmethod
    def open_step(path: Path) -> "Checkpoint":
        """Opens a step folder and checks COMMIT, manifest, parts, sizes and chunks; tensor data is not read.

        Raises:
            DamagedCheckpoint: the content differs from that of every save.
            CheckpointError: the step is whole, but its number is not that of its name, or a newer tk wrote it.
            StorageError: a file cannot be opened or read.
        """
        return Checkpoint(StepFolder.open_checked(path))

    @property
    def step(self) -> int:
        """The training step; 0 for a Hugging Face folder."""
        return self.manifest.step

    @property
    def layout(self) -> Layout:
        """The layout that saved the checkpoint."""
        return self.manifest.layout

    @property
    def resume(self) -> Mapping[str, Any]:
        """The state of the run beside its tensors, as `train/` saved it; empty if there is none."""
        return self.manifest.resume

    @property
    def manifest_sha256(self) -> str:
        """The checkpoint's identity; of a Hugging Face folder, the SHA-256 of its index or only header."""
        return self.folder.digest

    def config(self) -> dict[str, Any]:
        """Reads config.json.

        Raises:
            ShardMissing: the folder has no config.json.
            CheckpointError: it holds an adapter without one.
        """
        data = self.folder.read_side_files([hf.CONFIG]).get(hf.CONFIG)
        if data is None and self.manifest.adapter:
            raise CheckpointError(
                f"{self.path} holds an adapter and no model: it has no {hf.CONFIG}. Name the model that it was trained "
                f"on, or merge the two first: tk export --merge {self.path} NEW."
            )
        if data is None:
            raise ShardMissing(
                f"{self.path} has no {hf.CONFIG}. Copy that of the model into the folder; it names the "
                "architecture of the weights."
            )
        return strict.mapping(strict.parse(data, hf.CONFIG), str(self.path / hf.CONFIG))

    def side_files(self) -> dict[str, bytes]:
        """Reads config, tokenizer and other small files, and checks those that the manifest lists."""
        return self.folder.read_side_files()

    def also_named(self, names: Mapping[str, str]) -> "Checkpoint":
        """Returns the checkpoint with further names for some of its tensors: new name -> name here."""
        other = Checkpoint(self.folder, self.skipped)
        other.aliases = dict(self.aliases) | {name: self.aliases.get(there, there) for name, there in names.items()}
        other.tensors = self.tensors | {name: self.tensors[there] for name, there in names.items()}
        return other

    def read(
        self,
        name: str,
        box: Box | None = None,
        slot: str = "weight",
        flat: tuple[int, int] | None = None,
        dtype: DType | None = None,
    ) -> StoredArray:
        """Reads part of a tensor. Every 16 MiB block that the part touches is read whole and checked, if it has a
        checksum.

        Args:
            name: the logical name; a tied name reads the tensor to which it is tied.
            box: the elements to read; None = all.
            slot: "weight" or a slot of the optimizer.
            flat: [a, b) of the row-major order of the box; the result is then 1-D.
            dtype: the dtype of the result; None = as stored. If it differs from the stored dtype of slot "weight", the
                values are cast from slot "master" if the tensor has one.

        Raises:
            ShardMissing: the checkpoint has no tensor or slot of that name.
            ShardCorrupt: a checksum does not match; the message names tensor, file and block.
            ShapeMismatch: the box or the range is outside the tensor.
        """
        name, slot, stored = self.resolve(name, slot, dtype)
        shape = self.tensors[name].shape
        box = Box.whole(shape) if box is None else box
        region = Region.of(box, flat)
        inside = len(box.shape) == len(shape) and Box.whole(shape).contains(box)
        if not inside or not 0 <= region.start <= region.stop <= box.size:
            raise ShapeMismatch(f"{name} has shape {list(shape)}; box {box.bounds()}, range {flat}, is not in it.")
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

    def check(self) -> None:
        """Reads all metadata; see `CheckpointFolder.check`."""
        self.folder.check()

    def verify(self, on_bytes: Callable[[int], None] = lambda _: None) -> VerifyReport:
        """Reads and checks every byte, and looks for files that do not belong to the checkpoint.

        Args:
            on_bytes: called with the bytes of each block once it is checked.
        """
        return replace(verify(self.folder, on_bytes), notes=tuple(self.folder.notes()))

    def _read_chunk(self, chunk: Chunk, dtype: DType, target: Region, values: Array) -> None:
        """Copies the elements that `target` shares with a chunk into `values`, block by block."""
        spans = spans_to_read(chunk, target, dtype.itemsize)
        if not spans:
            return
        same_box, path = chunk.box == target.box, self.path / chunk.file
        with storage.closing(self.folder.open_data(chunk.file)) as fd:
            for low, high in spans:
                piece = Region(chunk.box, chunk.start + low, chunk.start + high)
                direct = same_box and target.start <= piece.start and piece.stop <= target.stop
                at = piece.start - target.start
                memory = values[at : at + piece.size] if direct else np.empty(piece.size, dtype.numpy)
                read_span(fd, path, chunk, as_bytes(memory), low * dtype.itemsize)
                if not direct:
                    copy_region(values, target, memory, piece)
