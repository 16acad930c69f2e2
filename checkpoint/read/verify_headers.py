"""The check of what other programs read of a sealed folder: names, dtypes and shapes in headers, and the index.

tk reads by manifest and parts alone; `transformers` reads by headers and index. Both must find the same tensors.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...core.errors import CheckpointError, StorageError
from ...core.geometry import Box
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.chunk import Chunk, Part
from ..format.manifest import Manifest
from ..format.safetensors_file import Header, read_header
from ..format.weight_index import weight_index
from . import hugging_face as hf
from .checkpoint_folder import CheckpointFolder
from .report import Problem


class _Stored(NamedTuple):
    """A tensor, or a run of one, as a header describes it; the K of `TENSOR@SLOT#K` is left out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_headers(folder: CheckpointFolder) -> Iterator[Problem]:
    """Yields a problem for each file whose header is not the written one, or describes other tensors than its part."""
    for part in folder.parts.values():
        for name, known in part.files.items():
            try:
                header = read_header(real_path(folder.path, name))
            except (CheckpointError, StorageError) as error:
                yield Problem(name, str(error))
                continue
            if header.sha256 != known.header_sha256:
                yield Problem(name, f"{folder.path / name}: its header is not the one that was written.")
            yield from _compare(folder.path / name, part, header, folder.manifest)


def check_index(folder: CheckpointFolder) -> Iterator[Problem]:
    """Yields a problem if the index of a sealed folder names other tensors, files or bytes than its parts."""
    if not folder.has_checksums:
        return
    shapes = {name: tensor.shape for name, tensor in folder.manifest.tensors.items()}
    wanted = None if folder.manifest.adapter else weight_index(folder.parts.values(), shapes)
    where = folder.path / hf.INDEX
    if hf.INDEX not in folder.manifest.files:
        if wanted is not None:
            yield Problem(hf.INDEX, f"{where} is not in the manifest, though every weight is stored as a whole tensor.")
        return
    if wanted is None:
        yield Problem(hf.INDEX, f"{where} is there, though the weights are no whole model of other programs.")
        return
    found = strict.mapping(strict.parse(folder.read_side_files([hf.INDEX])[hf.INDEX], str(where)), str(where))
    listed = strict.mapping(found.get("weight_map"), f"{where}: weight_map")
    wrong = [name for name, file in wanted["weight_map"].items() if listed.get(name) != file]
    wrong += [name for name in listed if name not in wanted["weight_map"]]
    if wrong:
        yield Problem(hf.INDEX, f"{where} says {listed.get(wrong[0], 'nothing')} of {wrong[0]}; the parts differ.")
    size, bytes_held = strict.mapping(found.get("metadata"), str(where)).get("total_size"), wanted["metadata"]
    if size != bytes_held["total_size"]:
        yield Problem(hf.INDEX, f"{where} says total_size = {size}; the weights have {bytes_held['total_size']} bytes.")


def _compare(path: Path, part: Part, header: Header, manifest: Manifest) -> Iterator[Problem]:
    stored = Counter(_from_header(header, manifest))
    listed = Counter(_from_part(part, path.name, manifest))
    only_stored, only_listed = sorted(stored - listed), sorted(listed - stored)
    if not only_stored and not only_listed:
        return
    says = [_words(found[0]) if found else "no such tensor" for found in (only_stored, only_listed)]
    yield Problem(path.name, f"{path}: its header has {says[0]}, where the manifest and its part have {says[1]}.")


def _from_header(header: Header, manifest: Manifest) -> Iterator[_Stored]:
    for entry in header.entries.values():
        name = entry.name if entry.name in manifest.tensors else entry.name.rpartition("#")[0]
        yield _Stored(name or entry.name, entry.dtype, entry.shape, entry.begin, entry.end)


def _from_part(part: Part, file: str, manifest: Manifest) -> Iterator[_Stored]:
    chunks: Iterable[Chunk] = (chunk for chunk in part.chunks if chunk.file == file)
    for chunk in chunks:
        tensor = manifest.tensors[chunk.tensor]
        whole = chunk.flat is None and chunk.box == Box.whole(tensor.shape)
        name = chunk.tensor if whole else f"{chunk.tensor}@{chunk.slot}"
        shape = chunk.box.shape if chunk.flat is None else (chunk.stop - chunk.start,)
        yield _Stored(name, tensor.slots[chunk.slot], shape, chunk.offset, chunk.offset + chunk.nbytes)


def _words(stored: _Stored) -> str:
    return f"{stored.name} ({stored.dtype}, shape {list(stored.shape)}, bytes {stored.begin} to {stored.end})"
