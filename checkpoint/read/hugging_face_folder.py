"""A Hugging Face folder of safetensors files as a checkpoint: its tables are made from the files' headers."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from ...core import dtypes
from ...core.errors import CheckpointError, ShardMissing
from ...core.garbage import no_garbage_collection
from ...core.geometry import Box
from ...core.layout import Layout
from ..files import lookup, storage
from ..files.file_watch import FileWatch
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.chunk import Chunk, Part
from ..format.chunk_index import TensorChunks
from ..format.manifest import FileDigest, Manifest, StoredTensor
from . import hugging_face as hf
from .hugging_face_weights import WeightFiles, find_weights
from .strangers import looks_like_weights

# The name of the base model inside the full model, by config.json's model_type, for the architectures that tk runs.
# Files of the base model alone lack this prefix. Names of other architectures are not changed.
BASE_PREFIXES: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "model.")
    | {"gpt2": "transformer."}
)
_BUFFERS: Final = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
)  # constants that old files of these architectures hold
_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight")
_TIED_UNLESS_SAID: Final = frozenset({"gpt2"})  # model types whose head is tied unless config.json unties it


class HuggingFaceFolder:
    """A `CheckpointFolder` without checksums: it has one slot, "weight", and no state of a run.

    Tensors have their names in the files. If tk runs the architecture and the files hold the base model alone, the base
    model's prefix is added to the names.
    """

    kind: ClassVar[Literal["huggingface"]] = "huggingface"
    has_checksums: ClassVar[bool] = False
    has_splits: ClassVar[bool] = False

    def __init__(self, path: Path, weights: WeightFiles, config: Mapping[str, object], watch: FileWatch) -> None:
        tensors, self.chunks = _tables(path, weights, _names(weights.weight_map, config))
        self.path, self.digest = path, weights.digest
        self._states = {name: header.state for name, header in weights.headers.items()}
        self._watch = watch | FileWatch({self.data_path(name): state for name, state in self._states.items()})
        contents = {name: state.content for name, state in self._states.items()}
        self.fingerprint = hashlib.sha256(json.dumps([weights.digest, config, contents]).encode()).hexdigest()
        self.manifest = Manifest(0, Layout(), tensors, _tied_head(config, tensors))
        self.parts: Mapping[str, Part] = {}
        self.sealed_files: Mapping[str, FileDigest] = {}
        self._files = {chunk.file for chunks in self.chunks.values() for chunk in chunks}
        self._sizes = {name: weights.headers[name].size for name in sorted(self._files)}

    @staticmethod
    @no_garbage_collection()
    def open(path: Path) -> "HuggingFaceFolder":
        """Opens a folder and reads the headers of all files. Raises the errors of `find_weights`.

        CheckpointError also if config or index change meanwhile: they would be of other weights than the headers.
        """
        watch = FileWatch.of(*(real_path(path, name) for name in (hf.CONFIG, hf.INDEX)))
        config = hf.read_config(path)
        weights = find_weights(path, config)
        watch.require_unchanged()
        return HuggingFaceFolder(path, weights, config, watch)

    def check(self) -> None:
        """See CheckpointFolder. Does nothing: `open` has read all metadata."""

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
        """See CheckpointFolder: the weights, the index, and the side files that `save_pretrained` writes."""
        templates = {name for name in self.side_paths() if name.startswith(f"{hf.TEMPLATES}/")}
        return self._weight_files() | hf.SAVED_BESIDE | templates

    def notes(self) -> list[str]:
        """See CheckpointFolder. Such a folder may hold any other files, so notes are about weight files only."""
        own = self._weight_files()
        counts = f"{hf.SINGLE} is read instead" if hf.SINGLE in own else f"{hf.INDEX} does not name it"
        others = [name for name in lookup.list_names(self.path) if name not in own and looks_like_weights(name)]
        return [f"{self.path / name} is not read: {counts}." for name in others]

    def left_behind(self) -> list[str]:
        """See CheckpointFolder."""
        taken = {name.split("/")[0] for name in (*self._weight_files(), *self.side_paths())}
        return [name for name in lookup.list_names(self.path) if name not in taken and not hf.is_hidden(name)]

    def _weight_files(self) -> set[str]:
        return self._files if hf.SINGLE in self._files else self._files | {hf.INDEX}


def _names(stored: Collection[str], config: Mapping[str, object]) -> dict[str, str]:
    """Returns the name in the model of each stored tensor that the model has."""
    base = BASE_PREFIXES.get(_model_type(config), "")
    prefix = "" if any(name.startswith(base) for name in stored) else base
    names = {
        name: name if name.startswith("lm_head.") else prefix + name
        for name in stored
        if not (base and name.endswith(_BUFFERS))
    }
    if base and _is_tied(config) and _HEAD in names and not any(name.endswith(_EMBEDDINGS) for name in names):
        # Only the head of a tied model is stored: `transformers` ties the embedding to it.
        names[_HEAD] = base + _EMBEDDINGS[_model_type(config) == "gpt2"]
    return names


def _tables(
    folder: Path, weights: WeightFiles, names: Mapping[str, str]
) -> tuple[dict[str, StoredTensor], dict[tuple[str, str], TensorChunks]]:
    """Returns the tensors by their names in the model, and the place of each tensor's bytes."""
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


def _model_type(config: Mapping[str, object]) -> str:
    return str(config.get("model_type", ""))


def _is_tied(config: Mapping[str, object]) -> bool:
    return config.get("tie_word_embeddings", _model_type(config) in _TIED_UNLESS_SAID) is True


def _tied_head(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if _HEAD in tensors or len(embeddings) != 1 or not _is_tied(config):
        return {}
    return {_HEAD: embeddings[0]}
