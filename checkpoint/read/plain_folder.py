"""A folder of safetensors files that another program wrote: what a model's and an adapter's have in common."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from ...core import dtypes
from ...core.errors import CheckpointError, ShardMissing
from ...core.geometry import Box
from ..files import lookup, storage
from ..files.file_watch import FileWatch
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.chunk import Chunk, Part
from ..format.chunk_index import TensorChunks
from ..format.manifest import FileDigest, Manifest, StoredTensor
from . import hugging_face as hf
from .hugging_face_weights import WeightFiles
from .strangers import looks_like_weights

Chunks = dict[tuple[str, str], TensorChunks]


class PlainFolder:
    """A `CheckpointFolder` without checksums: it has one slot, "weight", and no state of a run.

    Attributes:
        own_files: the files that hold the weights and say what they are.
        counts: the reason why other files of weights are not read, for notes.
    """

    has_checksums: ClassVar[bool] = False
    has_splits: ClassVar[bool] = False
    own_files: Collection[str] = ()
    counts: str = ""

    def __init__(
        self,
        path: Path,
        weights: WeightFiles,
        config: Mapping[str, object],
        watch: FileWatch,
        tables: tuple[Manifest, Chunks],
    ) -> None:
        """Reads nothing.

        Args:
            path: the folder.
            weights: the headers of its files.
            config: the content of the file that describes the weights.
            watch: the files that were read beside the headers.
            tables: the metadata, and the place of each tensor's bytes.
        """
        self.manifest, self.chunks = tables
        self.path, self.digest = path, weights.digest
        self._states = {name: header.state for name, header in weights.headers.items()}
        self._watch = watch | FileWatch({self.data_path(name): state for name, state in self._states.items()})
        contents = {name: state.content for name, state in self._states.items()}
        self.fingerprint = hashlib.sha256(json.dumps([weights.digest, config, contents]).encode()).hexdigest()
        self.parts: Mapping[str, Part] = {}
        self.sealed_files: Mapping[str, FileDigest] = {}
        self.data_files = {chunk.file for chunks in self.chunks.values() for chunk in chunks}
        self._sizes = {name: weights.headers[name].size for name in sorted(self.data_files)}

    def check(self) -> None:
        """See CheckpointFolder. Does nothing: all metadata is read when a folder is opened."""

    def data_path(self, file: str) -> Path:
        """See CheckpointFolder."""
        return real_path(self.path, strict.file_path(file, str(self.path)))

    def open_data(self, file: str) -> int:
        """See CheckpointFolder."""
        path = self.data_path(file)
        fd = storage.open_read(path)
        try:
            if storage.file_state(fd) != self._states[file]:
                raise CheckpointError(
                    f"{path} was replaced or changed after its header was read, so its tensors may lie elsewhere. Run "
                    "the command again when no program writes there."
                )
        except BaseException:
            storage.close(fd)
            raise
        return fd

    def end_lease(self) -> None:
        """See CheckpointFolder. Does nothing: no run prunes such a folder."""

    def require_unchanged(self) -> None:
        """See CheckpointFolder."""
        self._watch.require_unchanged()

    def file_sizes(self) -> Mapping[str, int]:
        """See CheckpointFolder."""
        return self._sizes

    def side_paths(self) -> dict[str, Path]:
        """See CheckpointFolder."""
        return hf.side_paths(self.path)

    def read_side_files(self, names: Collection[str] | None = None) -> dict[str, bytes]:
        """See CheckpointFolder."""
        return hf.read_side_files(self.path, names)

    def removable_files(self) -> set[str]:
        """See CheckpointFolder: its own files, and the side files that `save_pretrained` writes."""
        templates = {name for name in self.side_paths() if name.startswith(f"{hf.TEMPLATES}/")}
        return {*self.own_files} | hf.SAVED_BESIDE | templates

    def notes(self) -> list[str]:
        """See CheckpointFolder. Such a folder may hold any other files, so notes are about weight files only."""
        others = [name for name in lookup.list_names(self.path) if name not in self.own_files]
        return [f"{self.path / name} is not read: {self.counts}." for name in others if looks_like_weights(name)]

    def left_behind(self) -> list[str]:
        """See CheckpointFolder."""
        taken = {name.split("/")[0] for name in (*self.own_files, *self.side_paths())}
        return [name for name in lookup.list_names(self.path) if name not in taken and not hf.is_hidden(name)]


def plain_tables(
    folder: Path, weights: WeightFiles, names: Mapping[str, str]
) -> tuple[dict[str, StoredTensor], Chunks]:
    """Returns the tensors by their names in the model, and the place of each tensor's bytes.

    Args:
        folder: the folder, for messages.
        weights: the headers of its files.
        names: the name in the model of each stored tensor.

    Raises:
        ShardMissing: the index lists a tensor in a file that lacks it.
    """
    tensors, chunks = {}, {}
    for stored, name in names.items():
        file = weights.weight_map[stored]
        entry = weights.headers[file].entries.get(stored)
        if entry is None:
            raise ShardMissing(
                f"{folder / file} lacks {stored}, which {hf.INDEX} lists there. Download or save the model again."
            )
        tensors[name] = StoredTensor(entry.shape, {"weight": entry.dtype})
        box = Box.whole(entry.shape)
        chunk = Chunk(name, "weight", box, None, file, entry.begin, entry.end - entry.begin, None)
        chunks[name, "weight"] = TensorChunks(name, [chunk], entry.shape, dtypes.by_code(entry.dtype))
    return tensors, chunks
