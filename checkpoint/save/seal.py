"""The seal of a folder whose tensor data is written: checks all parts, then writes side files, manifest and COMMIT."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..files import folders, small_files
from ..format import json_strict as strict
from ..format.chunk import Part
from ..format.chunk_index import index_chunks
from ..format.manifest import COMMIT, MANIFEST, PARTS, FileDigest, Manifest, PartRecord
from ..format.weight_index import weight_index
from ..read import hugging_face as hf
from ..read.known_files import check_sizes


def seal(folder: Path, manifest: Manifest, parts: Mapping[str, bytes], side_files: Mapping[str, bytes]) -> Manifest:
    """Checks that the parts hold everything once, then writes side files, manifest and COMMIT, all durable.

    An adapter gets no index of a Hugging Face folder, since it is no model.

    Args:
        folder: the folder to seal.
        manifest: the metadata; `files` lists the side files that the folder holds already.
        parts: the content of each part, by file name.
        side_files: the content of the side files to write.

    Returns:
        The manifest with all `files` and `parts`.
    """
    parsed = {name: Part.parse(data, str(folder / PARTS / name)) for name, data in parts.items()}
    check_sizes(folder, parsed)
    shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
    index_chunks(list(parsed.values()), shapes, {name: tensor.slots for name, tensor in manifest.tensors.items()})
    index = {} if manifest.adapter else hugging_face_index(list(parsed.values()), shapes)
    files = dict(side_files) | index
    digests = {**manifest.files, **{name: FileDigest.of(data) for name, data in files.items()}}
    manifest = replace(
        manifest,
        files={strict.file_path(name, "side file"): digest for name, digest in digests.items()},
        parts={name: PartRecord.of(data, parsed[name], shapes) for name, data in parts.items()},
    )
    for name, data in files.items():
        small_files.write_small(folder / name, data)
    data = manifest.to_bytes()
    Manifest.parse(data, "the manifest to be written")
    small_files.write_small(folder / MANIFEST, data)
    small_files.write_small(folder / COMMIT, f"{FileDigest.of(data).sha256}\n".encode())
    folders.fsync_dir(folder / PARTS)
    folders.fsync_dir(folder)
    return manifest


def hugging_face_index(parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bytes]:
    """Returns {name: content} of the index of a Hugging Face folder; {} unless every weight is stored whole."""
    index = weight_index(parts, shapes)
    return {} if index is None else {hf.INDEX: json.dumps(index, indent=2).encode()}
