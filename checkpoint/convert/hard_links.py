"""Hard links in place of copies, for files of the target that the source holds already, byte for byte."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...core.errors import ConfigError
from ..files import folders, storage
from ..files.file_watch import changed_while_read
from ..files.storage import FileState
from ..format.chunk import Chunk, DataFile, Part
from ..read.reader import Checkpoint
from ..save.writer import PlannedFile
from .plan import CopyPlan

_UNLINKABLE: Final[Mapping[int | None, str]] = MappingProxyType(
    {
        errno.EXDEV: "they are on different file systems",
        errno.EPERM: "the file system has no links, or the file is another user's",
        errno.EOPNOTSUPP: "the file system has no links",
        errno.EMLINK: "the file has the largest number of links that the file system allows",
    }
)


@dataclass(frozen=True, slots=True)
class HardLink:
    """A file of the target that is equal to a file of the source.

    Attributes:
        writer: the writer in whose part the file is listed.
        source: the file's name in the source.
        file: the file in the target.
        chunks: the chunks for the target's part, with the source's checksums.
        state: the state of the source's file when its header was checked.
    """

    writer: int
    source: str
    file: PlannedFile
    chunks: tuple[Chunk, ...]
    state: FileState


def require_checksums(source: Checkpoint) -> None:
    """Raises ConfigError if a checkpoint has no checksums to carry over."""
    if not source.folder.has_checksums:
        raise ConfigError(f"{source.path} is no tk checkpoint, so it has no checksums to carry over; leave out --link.")


def split_off_links(plan: CopyPlan, source: Checkpoint) -> tuple[CopyPlan, tuple[HardLink, ...]]:
    """Splits a plan into the files to copy and the files to link.

    A file of the source is linked if its header is equal and it holds the same elements at the same places.
    """
    known = {digest: name for part in source.folder.parts.values() for name, digest in part.files.items()}
    held: dict[str, list[Chunk]] = {}
    for part in source.folder.parts.values():
        for chunk in part.chunks:
            held.setdefault(chunk.file, []).append(chunk)
    links = []
    for writer, files in enumerate(plan.files):
        for file in files:
            name = known.get(file.digest, "")
            chunks = sorted(held.get(name, ()), key=lambda chunk: chunk.offset)
            wanted = [(entry.owned.tensor, entry.owned.slot, entry.region, entry.begin) for entry in file.entries]
            if [(chunk.tensor, chunk.slot, chunk.region, chunk.offset) for chunk in chunks] == wanted:
                own = tuple(replace(chunk, file=file.name) for chunk in chunks)
                links.append(HardLink(writer, name, file, own, checked_state(source, name)))
    return _without(plan, links), tuple(links)


def make_links(links: Sequence[HardLink], source: Checkpoint, target: Path) -> None:
    """Makes the links in the folder `target`; ConfigError if the file system refuses."""
    for link in links:
        link_file(source.folder.data_path(link.source), target / link.file.name)


def checked_state(source: Checkpoint, name: str) -> FileState:
    """Returns the state of a data file of the source, whose header is checked."""
    with storage.closing(source.folder.open_data(name)) as fd:
        return storage.file_state(fd)


def require_unchanged(links: Sequence[HardLink], target: Path) -> None:
    """Raises CheckpointError if a file was written or replaced since its header was checked: its checksums are old."""
    for link in links:
        require_state(target / link.file.name, link.state)


def require_state(linked: Path, state: FileState) -> None:
    """Raises CheckpointError if a linked file does not have the content that its source had."""
    if storage.state_of(linked).content != state.content:  # the link itself is a change of another kind
        raise changed_while_read(linked)


def add_linked(parts: Sequence[Part], links: Sequence[HardLink]) -> list[Part]:
    """Returns the writers' parts with the linked files added."""
    result = []
    for part in parts:
        mine = [link for link in links if link.writer == part.writer]
        files: dict[str, DataFile] = {link.file.name: link.file.digest for link in mine}
        chunks = [chunk for link in mine for chunk in link.chunks]
        result.append(Part(part.writer, {**part.files, **files}, (*part.chunks, *chunks)))
    return result


def link_file(source: Path, target: Path) -> None:
    """Makes a hard link; ConfigError if it is impossible, e.g. between file systems."""
    try:
        folders.link(source, target)
    except OSError as error:
        if error.errno not in _UNLINKABLE:
            raise
        raise ConfigError(
            f"{source} cannot be linked as {target}: {_UNLINKABLE[error.errno]}. To copy it, leave out --link."
        ) from error


def _without(plan: CopyPlan, links: Sequence[HardLink]) -> CopyPlan:
    new, old = {link.file.name for link in links}, {link.source for link in links}
    files = tuple(tuple(file for file in of if file.name not in new) for of in plan.files)
    slot_copies = []
    for slot_copy in plan.slot_copies:
        targets = tuple(target for target in slot_copy.targets if target.file not in new)
        if targets:
            # A weight that is cast from its master must still read the master, even if the master's file is linked.
            same_slot = slot_copy.selection.slot == slot_copy.selection.source_slot
            sources = [chunk for chunk in slot_copy.sources if not (same_slot and chunk.file in old)]
            slot_copies.append(replace(slot_copy, sources=sources, targets=targets))
    return CopyPlan(files, tuple(slot_copies))
