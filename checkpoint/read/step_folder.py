"""A committed step: the folder that a save, a reshard or an export wrote."""

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, Literal

from ...core.errors import CheckpointError, NotCommitted
from ..files import lookup, small_files
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.manifest import COMMIT, MANIFEST, MAX_MANIFEST, PARTS, FileDigest, Manifest
from ..format.step_names import check_step_name
from . import hugging_face as hf
from .known_files import check_side_size, read_side_file
from .step_lease import StepLease
from .stored_chunks import StoredChunks
from .stored_parts import StoredParts
from .strangers import refuse_strangers


class StepFolder:
    """A `CheckpointFolder` with manifest, parts and checksums.

    The parts, file sizes and chunks of a tensor are read and checked when it is first used, so that reading one tensor
    of a large checkpoint opens few files. `check` checks all of them.
    """

    kind: ClassVar[Literal["tk"]] = "tk"
    has_checksums: ClassVar[bool] = True
    has_splits: ClassVar[bool] = True

    def __init__(self, path: Path, manifest: Manifest, digest: str) -> None:
        self.path, self.manifest, self.digest = path, manifest, digest
        self.lease: StepLease | None = None
        self.sealed_files = {name: known for name, known in manifest.files.items() if not hf.is_document(name)}
        self.fingerprint = digest  # the manifest has a checksum of every byte
        self.parts = StoredParts(path, manifest)
        self.chunks = StoredChunks(manifest, self.parts)

    @staticmethod
    def open(path: Path) -> "StepFolder":
        """Opens a step, and checks COMMIT, manifest, config.json, the index and the other side files' sizes.

        Raises:
            DamagedCheckpoint: the content differs from that of every save.
            CheckpointError: the step's number is not that of its name; a newer tk wrote it; a side file was edited; or
                another program put weights into the folder.
            StorageError: a file cannot be opened or read.
        """
        manifest, digest = _committed_manifest(path)
        check_step_name(path, manifest.step)
        folder = StepFolder(path, manifest, digest)
        refuse_strangers(path, lookup.list_names(path), manifest, folder.removable_files, folder._changed_files)
        folder.read_side_files([hf.CONFIG, hf.INDEX])
        for name, known in folder.sealed_files.items():
            check_side_size(path, name, known)
        return folder

    @staticmethod
    def open_leased(path: Path, checked: bool = True) -> "StepFolder":
        """Opens a step that the run does not prune as long as the result lives. Raises as `open` and `check`."""
        lease = StepLease.take(path)
        folder = StepFolder.open_checked(path) if checked else StepFolder.open(path)
        folder.lease = lease
        return folder

    @staticmethod
    def open_checked(path: Path) -> "StepFolder":
        """Opens a step and checks parts, sizes and chunks, but no tensor data. Raises as `open` and `check`."""
        folder = StepFolder.open(path)
        folder.check()
        return folder

    def check(self) -> None:
        """See CheckpointFolder."""
        self.chunks.check()
        self.parts.check_headers()

    def end_lease(self) -> None:
        """See CheckpointFolder."""
        if self.lease is not None:
            self.lease.end()

    def require_unchanged(self) -> None:
        """See CheckpointFolder. Does nothing: every byte that was read had its checksum."""

    def data_path(self, file: str) -> Path:
        """See CheckpointFolder."""
        return real_path(self.path, strict.file_name(file, str(self.path)))

    def open_data(self, file: str) -> int:
        """See CheckpointFolder."""
        return self.parts.open_data(file)

    def file_sizes(self) -> dict[str, int]:
        """See CheckpointFolder."""
        return {name: known.size for part in self.parts.values() for name, known in part.files.items()}

    def side_paths(self) -> dict[str, Path]:
        """See CheckpointFolder. A document that was removed is left out."""
        gone = {name for name in self.manifest.files if hf.is_document(name) and not lookup.exists(self.path / name)}
        return {name: real_path(self.path, name) for name in self.manifest.files if name not in gone}

    def read_side_files(self, names: Collection[str] | None = None) -> dict[str, bytes]:
        """See CheckpointFolder; documents are left out. CheckpointError if a file has changed since it was saved."""
        wanted = {name: known for name, known in self.sealed_files.items() if names is None or name in names}
        return {name: read_side_file(self.path, name, known, hf.MAX_SIDE_FILE) for name, known in wanted.items()}

    def removable_files(self) -> set[str]:
        """See CheckpointFolder: all files that the save wrote."""
        parts = {f"{PARTS}/{name}" for name in self.parts}
        return {COMMIT, MANIFEST, *parts, *self.manifest.files, *self.file_sizes()}

    def unknown_names(self) -> list[str]:
        """Returns the names in the folder, and in the folders of its files, that no save wrote."""
        own = self.removable_files()
        inner = sorted({name.rpartition("/")[0] for name in own if "/" in name} | {PARTS})
        found = [name for name in lookup.list_names(self.path) if name not in inner]
        found += [f"{folder}/{name}" for folder in inner for name in lookup.list_names(self.path / folder)]
        return [name for name in found if name not in own]

    def notes(self) -> list[str]:
        """See CheckpointFolder."""
        return [f"{self.path / name} is not one of this checkpoint's files." for name in self.unknown_names()] + [
            f"{self.path / name} was edited after the checkpoint was sealed."
            for name, path in self.side_paths().items()
            if name not in self.sealed_files
            and FileDigest.of(small_files.read_small(path, hf.MAX_SIDE_FILE)) != self.manifest.files[name]
        ]

    def left_behind(self) -> list[str]:
        """See CheckpointFolder."""
        return [name for name in self.unknown_names() if not hf.is_hidden(name)]

    def _changed_files(self) -> list[str]:
        """Returns the side files that are missing or differ from the sealed ones."""
        changed = []
        for name in self.sealed_files:
            try:
                self.read_side_files([name])
            except CheckpointError:
                changed.append(name)
        return changed


def _committed_manifest(folder: Path) -> tuple[Manifest, str]:
    if not lookup.exists(real_path(folder, COMMIT)):
        if lookup.exists(folder) and not lookup.is_dir(folder):
            raise CheckpointError(f"{folder} is not a folder, so it is no step. Move it out of the run folder.")
        raise NotCommitted(
            f"{folder} has no {COMMIT}: its save never finished. Use another step, or continue the training, "
            "which begins at the newest finished step."
        )
    wanted = small_files.read_small(real_path(folder, COMMIT), 4096)
    data = small_files.read_small(real_path(folder, MANIFEST), MAX_MANIFEST)
    digest = FileDigest.of(data).sha256
    if wanted != f"{digest}\n".encode():
        raise NotCommitted(f"{folder / MANIFEST} does not match {COMMIT}: it is damaged or belongs to another save.")
    return Manifest.parse(data, str(folder / MANIFEST)), digest
