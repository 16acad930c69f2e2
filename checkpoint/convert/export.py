"""Export: a checkpoint's weights as a folder that Hugging Face's libraries load, by copying or by hard links."""

import os
from dataclasses import replace
from pathlib import Path

from ...core.errors import ConfigError
from ...core.geometry import Box
from ...core.given_paths import as_path
from ...core.layout import Layout
from ..format.chunk import Part
from ..format.manifest import StoredTensor
from ..format.step_names import check_target_name
from ..read.reader import Checkpoint
from .hard_links import checked_state, link_file, require_checksums, require_state
from .identity import carry_identity
from .reshard import Options, Prepared, finish_folder, prepare_reshard
from .side_files import copy_side_files, plan_side_files
from .target import CopyTarget


def prepare_export(
    source: Checkpoint,
    target: str | os.PathLike[str],
    *,
    plain: bool = False,
    force: bool = False,
    apart: tuple[Path, ...] = (),
) -> Prepared:
    """Plans a copy of the weights at tp = 1; `.run()` executes it. See `prepare_reshard` and `Options`."""
    return prepare_reshard(source, target, Options(Layout(), weights_only=True, plain=plain, force=force, apart=apart))


def export_links(source: Checkpoint, target: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Exports by hard links to the source's weight files; their checksums are copied without reading the files.

    Args:
        source: the checkpoint to export.
        target: the new folder.
        force: whether to replace a checkpoint at `target`.

    Raises:
        ConfigError: the source does not store whole tensors (tp > 1 or ZeRO 3) or is no tk checkpoint, or its files
            cannot be linked in the target's file system.
    """
    path = as_path(target)
    check_target_name(path, source.step)
    require_checksums(source)
    weights = [chunk for key, chunks in source.chunks.items() if key[1] == "weight" for chunk in chunks]
    if any(chunk.region.size != Box.whole(source.tensors[chunk.tensor].shape).size for chunk in weights):
        raise ConfigError(
            f"{source.path} was saved at tp = {source.layout.tp}, ZeRO {source.layout.zero}: its files hold parts of "
            f"tensors and cannot be linked. To copy them instead, leave out --link."
        )
    tensors = {
        name: StoredTensor(tensor.shape, {"weight": tensor.slots["weight"]}, tensor.split, tensor.layer)
        for name, tensor in source.manifest.tensors.items()
    }
    manifest = replace(source.manifest, tensors=tensors, param_groups=(), resume={})
    parts = [_weights_of(part) for part in source.folder.parts.values()]
    files = plan_side_files(source)
    states = {name: checked_state(source, name) for part in parts for name in part.files}
    with CopyTarget(path, source, force).new_folder(sum(file.size for file in files)) as folder:
        for name, state in states.items():
            link_file(source.folder.data_path(name), folder / name)
            require_state(folder / name, state)
        finish_folder(folder, manifest, parts, copy_side_files(files, folder), plain=False)
    carry_identity(source, path, tensors)
    return path


def _weights_of(part: Part) -> Part:
    chunks = tuple(chunk for chunk in part.chunks if chunk.slot == "weight")
    files = {chunk.file for chunk in chunks}
    return Part(part.writer, {name: known for name, known in part.files.items() if name in files}, chunks)
