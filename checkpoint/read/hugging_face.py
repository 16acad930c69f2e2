"""The names in a Hugging Face folder: the files that `transformers` loads, and the side files beside the weights."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ...core.errors import ManifestError
from ..files import lookup, small_files
from ..files.links import real_path
from ..format import json_strict as strict
from .strangers import looks_like_weights

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
MAX_SIDE_FILE: Final = 2**28  # bytes
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
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
TEMPLATES: Final = "additional_chat_templates"  # a folder of side files
# Endings of side files: text, tokenizers, chat templates, and the code that config.json's `auto_map` names.
_SIDE_ENDINGS: Final = (
    *(".json", ".txt", ".model", ".jinja", ".py"),
    *(".tiktoken", ".spm", ".vocab", ".bpe"),
)
_LEGAL: Final = re.compile(r"(license|licence|notice|copying|readme|use_policy)([^a-z].*)?", re.IGNORECASE)


def is_hugging_face(folder: Path) -> bool:
    """Returns whether a folder has an index or a single file of weights, like a Hugging Face folder."""
    return any(lookup.exists(folder / name) for name in (INDEX, SINGLE))


def is_peft(folder: Path) -> bool:
    """Returns whether a folder has the two files of an adapter, like a folder of peft."""
    return all(lookup.exists(folder / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def is_hidden(path: str) -> bool:
    """Returns whether a file, or a folder that it lies in, is hidden: .git, .DS_Store, AppleDouble's ._NAME."""
    return any(name.startswith(".") for name in path.split("/"))


def is_document(path: str) -> bool:
    """Returns whether a side file is for people, as a model card or a licence; nothing depends on its content."""
    return path.endswith(".md") or _LEGAL.fullmatch(path) is not None


def read_config(folder: Path) -> dict[str, object]:
    """Reads config.json; {} if the folder has none."""
    data = read_side_files(folder, [CONFIG]).get(CONFIG, b"{}")
    return strict.mapping(strict.parse(data, str(folder / CONFIG)), str(folder / CONFIG))


def read_side_files(folder: Path, names: Collection[str] | None = None) -> dict[str, bytes]:
    """Reads the side files: config, tokenizer and others (of `names`, if given, those that exist)."""
    return {name: small_files.read_small(path, MAX_SIDE_FILE) for name, path in side_paths(folder, names).items()}


def side_paths(folder: Path, names: Collection[str] | None = None) -> dict[str, Path]:
    """Returns the paths of the side files by name (of `names`, if given, those that exist).

    Hidden files are ignored, and documents that a checkpoint cannot store: folders, and names as `LICENSE (1)`.

    Raises:
        ManifestError: another side file has a name that a checkpoint cannot store.
        CheckpointError: a side file is a link that leads nowhere.
    """
    found = [name for name in _side_names(folder) if names is None or name in names]
    paths = {}
    for name in found:
        document = is_document(name)
        if document and lookup.is_dir(folder / name):
            continue
        try:
            paths[strict.file_path(name, str(folder))] = real_path(folder, name)
        except ManifestError as error:
            if document:
                continue
            raise ManifestError(f"{error} Rename it, or move it out of the folder.") from error
    return paths


def _side_names(folder: Path) -> list[str]:
    names = [name for name in lookup.list_names(folder) if _is_side_file(name)]
    inner = lookup.list_names(folder / TEMPLATES) if lookup.is_dir(folder / TEMPLATES) else []
    return names + [f"{TEMPLATES}/{name}" for name in inner if name.endswith(".jinja") and not is_hidden(name)]


def _is_side_file(name: str) -> bool:
    if is_hidden(name) or looks_like_weights(name):
        return False
    return name.endswith(_SIDE_ENDINGS) or is_document(name)
