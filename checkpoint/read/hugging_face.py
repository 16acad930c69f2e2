"""The names in a Hugging Face folder: the files that `transformers` loads, and the side files beside the weights."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ...core.errors import ManifestError
from ..files import lookup, small_files
from ..files.links import real_path
from ..format import json_strict as strict

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
MAX_SIDE_FILE: Final = 2**28  # bytes
ADAPTER_CONFIG: Final = "adapter_config.json"
DISTRIBUTED: Final = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# The files that `save_pretrained` and the training of tokenizers write beside weights.
SAVED_BESIDE: Final = frozenset(
    {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
        "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
        "processor_config.json", "image_processor_config.json", "video_preprocessor_config.json",
    }
)  # fmt: skip
_SIDE_ENDINGS: Final = (".json", ".txt", ".model", ".jinja")


def is_hugging_face(folder: Path) -> bool:
    """Returns whether a folder has an index or a single file of weights, like a Hugging Face folder."""
    return any(lookup.exists(folder / name) for name in (INDEX, SINGLE))


def is_preferred(name: str) -> bool:
    """Returns whether `transformers` would load that file instead of a folder's other weights, or beside them."""
    return name in (SINGLE, INDEX, ADAPTER_CONFIG) or DISTRIBUTED.fullmatch(name) is not None


def read_config(folder: Path) -> dict[str, object]:
    """Reads config.json; {} if the folder has none."""
    data = read_side_files(folder, [CONFIG]).get(CONFIG, b"{}")
    return strict.mapping(strict.parse(data, str(folder / CONFIG)), str(folder / CONFIG))


def read_side_files(folder: Path, names: Collection[str] | None = None) -> dict[str, bytes]:
    """Reads the side files: config, tokenizer and others (of `names`, if given, those that exist)."""
    return {name: small_files.read_small(path, MAX_SIDE_FILE) for name, path in side_paths(folder, names).items()}


def side_paths(folder: Path, names: Collection[str] | None = None) -> dict[str, Path]:
    """Returns the paths of the side files by name (of `names`, if given, those that exist); hidden files are ignored.

    Raises:
        ManifestError: a side file has a name that a checkpoint cannot store.
        CheckpointError: a side file is a link that leads out of the folder and the hub's cache.
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
