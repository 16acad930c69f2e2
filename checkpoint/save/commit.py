"""The commit of a step by rank 0: waits for all parts, checks them, writes manifest and COMMIT, renames the folder."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ShardMissing
from ...core.geometry import Box
from ..files import folders, lookup, small_files
from ..format import json_strict as strict
from ..format.chunk import Part
from ..format.chunk_index import index_chunks
from ..format.manifest import COMMIT, MANIFEST, MAX_PART, PARTS, FileDigest, Manifest, PartRecord
from ..format.step_names import step_name
from ..read import hugging_face as hf
from ..read.known_files import check_sizes
from ..run.locked_run import LockedRun
from .new_step import NewStep
from .writer import part_name

_MAX_POLL_SECONDS: Final = 0.5
_LOG_AFTER: Final = 30.0  # seconds of waiting

_log = logging.getLogger(__name__)


def commit(run: LockedRun, new: NewStep, timeout: float = 600.0) -> Path:
    """Completes a step that every rank of its layout writes (or has written) with `write_part`, and makes it visible.

    Args:
        run: the run, in which `begin_step` has made the step's temporary folder.
        new: the step's metadata.
        timeout: seconds to wait for the parts of other ranks.

    Returns:
        The step's folder under its final name.

    Raises:
        ShardMissing: some parts did not arrive in time; the message names them.
        ManifestError: the parts do not hold every element of every slot exactly once.
        CheckpointError: a folder of the final name exists, or another job has taken the run's lock.
    """
    folder, final = run.pending_step(new.step), run.path / step_name(new.step)
    manifest = new.manifest()
    parts = wait_for_parts(folder, new.layout.world_size, timeout)
    seal(folder, manifest, parts, new.side_files)
    run.require_lock()
    publish(folder, final)
    run.point_latest(new.step)
    return final


def wait_for_parts(folder: Path, num_writers: int, timeout: float) -> dict[str, bytes]:
    """Waits for every writer's part and returns their contents; ShardMissing, naming the missing ones, on timeout."""
    wanted = [part_name(writer) for writer in range(num_writers)]
    begun, pause, logged = time.monotonic(), 0.01, False
    while True:
        missing = set(wanted) - set(lookup.list_names(folder / PARTS))
        if not missing:
            return {name: small_files.read_small(folder / PARTS / name, MAX_PART) for name in wanted}
        waited, named = time.monotonic() - begun, ", ".join(sorted(missing)[:8])
        if waited > timeout:
            raise ShardMissing(
                f"{folder}: after {timeout:.0f} s {len(missing)} of {num_writers} writers have not finished: {named}. "
                f"The step is not committed; see the logs of those ranks."
            )
        if waited > _LOG_AFTER and not logged:
            logged = True
            _log.warning("%s: waiting for %d of %d writers: %s.", folder, len(missing), num_writers, named)
        time.sleep(pause)
        pause = min(2 * pause, _MAX_POLL_SECONDS)  # spares a shared file system


def seal(folder: Path, manifest: Manifest, parts: Mapping[str, bytes], side_files: Mapping[str, bytes]) -> Manifest:
    """Checks that the parts hold everything once, then writes side files, manifest and COMMIT, all durable.

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
    files = dict(side_files) | hugging_face_index(list(parsed.values()), shapes)
    digests = {**manifest.files, **{name: FileDigest.of(data) for name, data in files.items()}}
    manifest = replace(
        manifest,
        files={strict.file_name(name, "side file"): digest for name, digest in digests.items()},
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


def publish(folder: Path, final: Path) -> None:
    """Renames a sealed folder to its final name, durably: this is the commit point."""
    if lookup.exists(final):
        raise CheckpointError(f"{final} exists and is not overwritten; {folder} holds the new step.")
    folders.rename(folder, final)
    folders.fsync_dir(final.parent)


def hugging_face_index(parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bytes]:
    """Returns {name: content} of the index of a Hugging Face folder; {} unless every weight is stored whole."""
    chunks = [chunk for part in parts for chunk in part.chunks if chunk.slot == "weight"]
    if any(chunk.flat is not None or chunk.box != Box.whole(shapes[chunk.tensor]) for chunk in chunks):
        return {}
    weight_map = {chunk.tensor: chunk.file for chunk in sorted(chunks, key=lambda chunk: chunk.tensor)}
    index = {"metadata": {"total_size": sum(chunk.nbytes for chunk in chunks)}, "weight_map": weight_map}
    return {hf.INDEX: json.dumps(index, indent=2).encode()}
