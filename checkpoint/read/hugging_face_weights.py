"""The weight files of a Hugging Face folder: those that `transformers` would read, and their headers."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import CheckpointError, ManifestError
from ..files import lookup, small_files
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.safetensors_file import TK_MARK, Header, read_header
from .hugging_face import ADAPTER_CONFIG, CONFIG, DISTRIBUTED, INDEX, MAX_SIDE_FILE, SINGLE


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a folder.

    Attributes:
        headers: the header of each file, by file name.
        weight_map: the name of each tensor -> the name of the file that holds it.
        digest: the SHA-256 of the index, or of the header of a single file.
    """

    headers: Mapping[str, Header]
    weight_map: Mapping[str, str]
    digest: str


def find_weights(folder: Path, config: Mapping[str, object]) -> WeightFiles:
    """Reads the index and the header of every file, but no tensor data.

    If the folder has both a single file and an index, the single file is read, as `transformers` does.

    Args:
        folder: the Hugging Face folder.
        config: the content of its config.json.

    Raises:
        ShardMissing: the index names a file or a tensor that is missing.
        ManifestError: a header or the index breaks a rule of its format.
        CheckpointError: a file belongs to a tk checkpoint, or is a link that leads nowhere; or `transformers` would
            load other weights than these.
    """
    _refuse_other_weights(folder, config)
    if lookup.exists(folder / SINGLE):
        return single_file(folder, SINGLE)
    data = small_files.read_small(real_path(folder, INDEX), MAX_SIDE_FILE)
    indexed = _weight_map(strict.parse(data, str(folder / INDEX)), str(folder / INDEX))
    headers = {name: _header(folder, name) for name in sorted(set(indexed.values()))}
    return WeightFiles(headers, _held(folder, indexed, headers), hashlib.sha256(data).hexdigest())


def single_file(folder: Path, name: str) -> WeightFiles:
    """Reads the header of the one weight file of a folder; ManifestError if it holds no tensors."""
    header = _header(folder, name)
    if not header.entries:
        raise ManifestError(f"{folder / name} holds no tensors.")
    return WeightFiles({name: header}, dict.fromkeys(header.entries, name), header.sha256)


def _refuse_other_weights(folder: Path, config: Mapping[str, object]) -> None:
    """Raises CheckpointError if `transformers` would load other weight files, or change the weights on loading."""
    named = config.get("transformers_weights")
    if named is not None:
        raise CheckpointError(
            f"{folder / CONFIG} sets transformers_weights = {str(named)[:80]!r}, but tk reads {SINGLE} and {INDEX}. "
            f"Rename that file to {SINGLE} (or its index to {INDEX}) and remove the key."
        )
    if lookup.exists(folder / ADAPTER_CONFIG):
        raise CheckpointError(
            f"{folder} holds an adapter (PEFT, {ADAPTER_CONFIG}) beside the weights; `transformers` would apply it. "
            "Move the adapter's files into a folder of their own, which tk reads as an adapter, or remove them."
        )
    shards = [name for name in lookup.list_names(folder) if DISTRIBUTED.fullmatch(name)]
    if shards:
        raise CheckpointError(
            f"{folder} holds {shards[0]}, a part of a distributed checkpoint, which `transformers` would load instead "
            f"of the other weights there. Load it with transformers and call save_pretrained(), or remove those files."
        )


def _header(folder: Path, name: str) -> Header:
    header = read_header(real_path(folder, strict.file_path(name, str(folder))))
    if TK_MARK in header.metadata:
        raise CheckpointError(
            f"{folder / name} belongs to a tk checkpoint whose manifest and COMMIT are missing. Copy "
            f"those files too, or make a folder that needs neither with `tk export --plain`."
        )
    return header


def _weight_map(document: object, what: str) -> dict[str, str]:
    found = strict.mapping(strict.mapping(document, what).get("weight_map"), f"{what}: weight_map")
    if not found:
        raise ManifestError(f"{what} names no tensors.")
    return {name: strict.file_path(file, f"{what}: {name[:80]}") for name, file in found.items()}


def _held(folder: Path, indexed: Mapping[str, str], headers: Mapping[str, Header]) -> dict[str, str]:
    """Returns the file of every tensor: those that the index names, and the other tensors in the index's files.

    `transformers` reads these files whole; of two tensors with one name it takes the one in the later file.
    """
    held = {name: file for file, header in headers.items() for name in header.entries}
    for name, file in indexed.items():
        if held.get(name, file) != file:
            raise CheckpointError(
                f"{folder / INDEX} says that {name} is in {file}, and {held[name]} holds one too, which `transformers` "
                f"would load instead. Remove the wrong one, or save the model again into an empty folder."
            )
    return {**indexed, **held}
