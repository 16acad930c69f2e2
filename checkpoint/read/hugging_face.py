"""A Hugging Face folder of safetensors files seen as a checkpoint: the same tables, made from the files' headers."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...core import dtypes
from ...core.errors import CheckpointError, ManifestError, ShardMissing
from ...core.geometry import Box
from ..files import lookup, small_files
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.chunk import Chunk
from ..format.chunk_index import ChunkIndex, TensorChunks
from ..format.manifest import StoredTensor
from ..format.safetensors_file import TK_MARK, Header, read_header

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
MAX_SIDE_FILE: Final = 2**28  # bytes
ADAPTER_CONFIG: Final = "adapter_config.json"
# What the base model is called inside the model of an architecture that tk runs, by config.json's model_type. Files
# of the base model alone lack it; no other architecture's names are touched.
BASE_PREFIXES: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), "model.") | {"gpt2": "transformer."}
)
_BUFFERS: Final = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants that old files of these keep
_TIED_UNLESS_SAID: Final = frozenset({"gpt2"})  # model types whose head is tied where config.json says nothing
_DISTRIBUTED: Final = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# What `save_pretrained` and the training of tokenizers write beside weights.
SAVED_BESIDE: Final = frozenset(
    {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
        "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
        "processor_config.json", "image_processor_config.json", "video_preprocessor_config.json",
    }
)  # fmt: skip
_SIDE_ENDINGS: Final = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True, slots=True)
class HuggingFaceFolder:
    """What a folder holds.

    Attributes:
        tensors, chunks: as in a tk checkpoint, one slot, "weight". Names are those in the files; where tk runs the
            architecture and the base model was saved alone, its prefix stands before them.
        digest: SHA-256 of the index, or of the header of a single file.
    """

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    chunks: ChunkIndex
    digest: str


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder looks like one of Hugging Face's: an index or a single file of weights."""
    return any(lookup.exists(folder / name) for name in (INDEX, SINGLE))


def is_preferred(name: str) -> bool:
    """Whether `transformers` loads a file of that name before all others of a folder, or besides."""
    return name in (SINGLE, INDEX, ADAPTER_CONFIG) or _DISTRIBUTED.fullmatch(name) is not None


def open_folder(folder: Path) -> HuggingFaceFolder:
    """Reads the index and the header of every file; no tensor data.

    Where there are both, a single file counts and not an index, as for `transformers`.

    Raises:
        ShardMissing: the index names a file or a tensor that is not there.
        ManifestError: a header or the index breaks its format's rules.
        CheckpointError: a file is a part of a tk checkpoint, or a link out of the folder and the hub's cache; or
            `transformers` would load other weights than these.
    """
    config = read_config(folder)
    _refuse_other_weights(folder, config)
    if lookup.exists(folder / SINGLE):
        headers = {SINGLE: _header(folder, SINGLE)}
        weight_map = dict.fromkeys(headers[SINGLE].entries, SINGLE)
        digest = headers[SINGLE].sha256
    else:
        data = small_files.read_small(real_path(folder, INDEX, inside=True), MAX_SIDE_FILE)
        indexed = _weight_map(strict.parse(data, str(folder / INDEX)), str(folder / INDEX))
        headers = {name: _header(folder, name) for name in sorted(set(indexed.values()))}
        weight_map = _held(folder, indexed, headers)
        digest = hashlib.sha256(data).hexdigest()
    if not weight_map:
        raise ManifestError(f"{folder / SINGLE} holds no tensors.")
    base = BASE_PREFIXES.get(_model_type(config), "")
    prefix = "" if any(name.startswith(base) for name in weight_map) else base
    tensors, chunks = {}, {}
    for stored, file in weight_map.items():
        if base and stored.endswith(_BUFFERS):
            continue
        entry = headers[file].entries.get(stored)
        if entry is None:
            raise ShardMissing(f"{folder / file} lacks {stored}, which {INDEX} says it holds.")
        name = stored if stored.startswith("lm_head.") else prefix + stored
        tensors[name] = StoredTensor(entry.shape, {"weight": entry.dtype})
        box = Box.whole(entry.shape)
        chunk = Chunk(name, "weight", box, None, file, entry.begin, entry.end - entry.begin, None)
        chunks[name, "weight"] = TensorChunks(name, [chunk], entry.shape, dtypes.by_code(entry.dtype))
    return HuggingFaceFolder(tensors, _tied_head(config, tensors), chunks, digest)


def read_config(folder: Path) -> dict[str, object]:
    """The content of config.json; {} if there is none."""
    data = read_side_files(folder, [CONFIG]).get(CONFIG, b"{}")
    return strict.mapping(strict.parse(data, str(folder / CONFIG)), str(folder / CONFIG))


def read_side_files(folder: Path, names: Sequence[str] | None = None) -> dict[str, bytes]:
    """Config, tokenizer and such beside the weights (of `names`, if given, those that exist)."""
    return {name: small_files.read_small(path, MAX_SIDE_FILE) for name, path in side_paths(folder, names).items()}


def side_paths(folder: Path, names: Sequence[str] | None = None) -> dict[str, Path]:
    """Where config, tokenizer and such are, by name (of `names`, if given, those that exist); hidden files are none.

    Raises:
        ManifestError: a name that a checkpoint cannot have.
        CheckpointError: a link out of the folder and the hub's cache.
    """
    found = [
        name
        for name in lookup.list_names(folder)
        if name.endswith(_SIDE_ENDINGS) and not name.endswith(".index.json") and (names is None or name in names)
    ]
    paths = {}
    for name in found:
        if name.startswith("."):
            continue
        try:
            paths[strict.file_name(name, str(folder))] = real_path(folder, name, inside=True)
        except ManifestError as error:
            raise ManifestError(f"{error} Rename it, or move it out of the folder.") from error
    return paths


def _refuse_other_weights(folder: Path, config: Mapping[str, object]) -> None:
    """CheckpointError where `transformers` loads other files than an index or a single file, or changes them."""
    named = config.get("transformers_weights")
    if named is not None:
        raise CheckpointError(
            f"{folder / CONFIG} says transformers_weights = {str(named)[:80]!r}; only {SINGLE} and {INDEX} are read. "
            f"Give the weights that name and remove the key."
        )
    if lookup.exists(folder / ADAPTER_CONFIG):
        raise CheckpointError(
            f"{folder} holds an adapter (PEFT, {ADAPTER_CONFIG}) beside the weights; `transformers` would apply it. "
            f"Merge it with merge_and_unload() of peft and save_pretrained(), or remove its files."
        )
    shards = [name for name in lookup.list_names(folder) if _DISTRIBUTED.fullmatch(name)]
    if shards:
        raise CheckpointError(
            f"{folder} holds {shards[0]}, a part of a distributed checkpoint, which `transformers` would load instead "
            f"of the other weights there. Load it with transformers and save_pretrained, or remove those files."
        )


def _header(folder: Path, name: str) -> Header:
    header = read_header(real_path(folder, strict.file_name(name, str(folder)), inside=True))
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


def _held(folder: Path, indexed: Mapping[str, str], headers: Mapping[str, Header]) -> dict[str, str]:
    """Where every tensor is: those that the index names and those that it forgets in its files, for `transformers`
    reads these files whole, and of two tensors of one name the later file's."""
    held = {name: file for file, header in headers.items() for name in header.entries}
    for name, file in indexed.items():
        if held.get(name, file) != file:
            raise CheckpointError(
                f"{folder / INDEX} says that {name} is in {file}, and {held[name]} holds one that "
                f"`transformers` would take. Remove the wrong one, or save the model again into an empty folder."
            )
    return {**indexed, **held}


def _model_type(config: Mapping[str, object]) -> str:
    return str(config.get("model_type", ""))


def _tied_head(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    embeddings = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    tied = config.get("tie_word_embeddings", _model_type(config) in _TIED_UNLESS_SAID)
    if "lm_head.weight" in tensors or len(embeddings) != 1 or tied is not True:
        return {}
    return {"lm_head.weight": embeddings[0]}
