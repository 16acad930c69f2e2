"""A Hugging Face folder of safetensors files seen as a checkpoint: the same tables, made from the files' headers."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..core import dtypes
from ..core.errors import CheckpointError, ManifestError, ShardMissing
from ..core.geometry import Box
from . import json_strict as strict
from . import storage
from .chunk import Chunk
from .chunk_index import ChunkIndex, TensorChunks
from .manifest import StoredTensor
from .safetensors_file import TK_MARK, Header, read_header

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
MAX_SIDE_FILE: Final = 2**28  # bytes
_BASE_PREFIXES: Final = ("model.", "transformer.")
_BUFFERS: Final = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants that old files keep
_SIDE_ENDINGS: Final = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True, slots=True)
class HuggingFaceFolder:
    """What a folder holds.

    Attributes:
        tensors, chunks: as in a tk checkpoint, with names that start with the base model's prefix; one slot, "weight".
        digest: SHA-256 of the index, or of the header of a single file.
    """

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    chunks: ChunkIndex
    digest: str


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder looks like one of Hugging Face's: an index or a single file of weights."""
    return any((folder / name).exists() for name in (INDEX, SINGLE))


def open_folder(folder: Path) -> HuggingFaceFolder:
    """Reads the index and the header of every file; no tensor data.

    Raises:
        ShardMissing: the index names a file or a tensor that is not there.
        ManifestError: a header or the index breaks its format's rules.
        CheckpointError: a file is a part of a tk checkpoint, or a link out of the folder and the hub's cache.
    """
    if (folder / INDEX).exists():
        data = storage.read_small(_inside(folder, INDEX), MAX_SIDE_FILE)
        weight_map = _weight_map(strict.parse(data, str(folder / INDEX)), str(folder / INDEX))
        headers = {name: _header(folder, name) for name in sorted(set(weight_map.values()))}
        digest = hashlib.sha256(data).hexdigest()
    else:
        headers = {SINGLE: _header(folder, SINGLE)}
        weight_map = dict.fromkeys(headers[SINGLE].entries, SINGLE)
        digest = headers[SINGLE].sha256
    prefix = _missing_prefix(weight_map, folder)
    tensors, chunks = {}, {}
    for stored, file in weight_map.items():
        if stored.endswith(_BUFFERS):
            continue
        entry = headers[file].entries.get(stored)
        if entry is None:
            raise ShardMissing(f"{folder / file} lacks {stored}, which {INDEX} says it holds.")
        name = stored if stored.startswith("lm_head.") else prefix + stored
        tensors[name] = StoredTensor(entry.shape, {"weight": entry.dtype})
        box = Box.whole(entry.shape)
        chunk = Chunk(name, "weight", box, None, file, entry.begin, entry.end - entry.begin, None)
        chunks[name, "weight"] = TensorChunks(name, [chunk], entry.shape, dtypes.by_code(entry.dtype))
    return HuggingFaceFolder(tensors, _tied_head(folder, tensors), chunks, digest)


def read_config(folder: Path) -> dict[str, object]:
    """The content of config.json; {} if there is none."""
    data = read_side_files(folder, [CONFIG]).get(CONFIG, b"{}")
    return strict.mapping(strict.parse(data, str(folder / CONFIG)), str(folder / CONFIG))


def read_side_files(folder: Path, names: Sequence[str] | None = None) -> dict[str, bytes]:
    """Config, tokenizer and such beside the weights (of `names`, if given, those that exist)."""
    found = [
        name
        for name in storage.list_names(folder)
        if name.endswith(_SIDE_ENDINGS) and not name.endswith(".index.json") and (names is None or name in names)
    ]
    return {
        strict.file_name(name, str(folder)): storage.read_small(_inside(folder, name), MAX_SIDE_FILE) for name in found
    }


def data_path(folder: Path, name: str) -> Path:
    """The regular file behind a name in the folder, through a link of the hub's cache if it is one."""
    return _inside(folder, strict.file_name(name, str(folder)))


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    real_folder = Path(os.path.realpath(folder))
    blobs = real_folder.parent.parent / "blobs"  # hub cache: models--x--y/{blobs,snapshots/REVISION}
    if target.parent not in (real_folder, blobs):
        raise CheckpointError(
            f"{path} is a link to {target}, outside its folder and the hub's cache; put the file itself there."
        )
    return target


def _header(folder: Path, name: str) -> Header:
    header = read_header(data_path(folder, name))
    if TK_MARK in header.metadata:
        raise CheckpointError(
            f"{folder / name} belongs to a tk checkpoint whose manifest and COMMIT are gone; without them it is not "
            f"read. `tk export --plain` makes a folder that needs neither."
        )
    return header


def _weight_map(document: object, what: str) -> dict[str, str]:
    found = strict.mapping(strict.mapping(document, what).get("weight_map"), f"{what}: weight_map")
    if not found:
        raise ManifestError(f"{what} names no tensors.")
    return {name: strict.file_name(file, f"{what}: {name[:80]}") for name, file in found.items()}


def _missing_prefix(names: dict[str, str], folder: Path) -> str:
    if any(name.startswith(_BASE_PREFIXES) for name in names):
        return ""
    return "transformer." if read_config(folder).get("model_type") == "gpt2" else "model."


def _tied_head(folder: Path, tensors: dict[str, StoredTensor]) -> dict[str, str]:
    embeddings = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if "lm_head.weight" in tensors or len(embeddings) != 1 or read_config(folder).get("tie_word_embeddings") is False:
        return {}
    return {"lm_head.weight": embeddings[0]}
