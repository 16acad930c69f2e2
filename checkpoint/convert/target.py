"""The target of a copy: a new folder, or one that replaces a checkpoint and nothing else."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import ConfigError
from ..files import disk_facts, lookup
from ..files.place import check_place, require_room
from ..files.whole_folder import whole_folder
from ..read.reader import Checkpoint
from ..run.run_folder import holding
from .replaceable import ReplaceableFolder


class CopyTarget:
    """The folder that a copy makes.

    Attributes:
        path: the new folder.
    """

    def __init__(self, path: Path, source: Checkpoint, force: bool, apart: Sequence[Path] = ()) -> None:
        """Touches nothing.

        Args:
            path: the new folder.
            source: the checkpoint to copy; its folder must not be the target, lie inside it or contain it.
            force: whether to replace a checkpoint at `path`; the old one stays whole until the new one is complete.
            apart: other folders that the copy reads, of which the same is true as of the source's.
        """
        self.path = path
        self._sources, self._force = (source.path, *apart), force
        self._old = ReplaceableFolder(path, source.folder.side_paths)

    def check(self) -> tuple[str, ...]:
        """Returns the files of the checkpoint that will be replaced; none if `path` is free or an empty folder.

        Raises:
            ConfigError: `path` cannot become a new folder: it is the source, lies inside it or contains it; it is a
                link, a file, a mount point or the current folder; a folder above it is no folder or cannot be written;
                or it holds files that are no checkpoint, or a checkpoint and `force` is not given.
        """
        check_place(self.path)
        for source in self._sources:
            _check_apart(self.path, source)
        if not lookup.list_names(self.path):
            return ()
        files = self._old.files()
        if not self._force:
            raise ConfigError(f"{self.path} exists; name another folder, or replace it with --force.")
        for folder in sorted({(self.path / name).parent for name in files}):
            if not disk_facts.may_write(folder):
                raise ConfigError(
                    f"{folder} cannot be written by this user, so it cannot be replaced; name another folder."
                )
        return files

    @contextmanager
    def new_folder(self, num_bytes: int = 0) -> Iterator[Path]:
        """Makes a folder to write in, which becomes `path` if the block succeeds; see `whole_folder`.

        Args:
            num_bytes: the bytes to be written, for which the disk must have room; 0 = a few.

        Raises:
            ConfigError: see `check`; or another job is writing `path`.
            TkError: the disk has no room.
            CheckpointError: `path` has been taken meanwhile; the message says where the new folder is. Or `path` is a
                step of a run in which a job writes.
        """
        self.check()
        require_room(self.path, num_bytes)
        with holding(self.path), whole_folder(self.path, self.check) as folder:
            yield folder


def _check_apart(path: Path, source: Path) -> None:
    """Compares folders by device and inode: one folder has many paths, through links, mounts and letter case."""
    ours, theirs = _lineage(path), _lineage(source)
    if ours[0] in theirs:
        raise ConfigError(f"{path} is the source {source} or contains it; name another target folder.")
    if theirs[0] in ours:
        raise ConfigError(f"{path} lies inside the source {source}; name a target folder beside it.")
    for name in lookup.list_names(source):
        if lookup.is_link(source / name) and ours[0] in _lineage(source / name):
            raise ConfigError(
                f"{path} holds the file behind {source / name}, which the copy reads; name another target folder."
            )


def _lineage(path: Path) -> list[tuple[int, int] | Path]:
    """Returns the device and inode of a path and of each folder above it; the path itself where nothing is there."""
    real = Path(os.path.realpath(path))
    return [disk_facts.identity(each) or each for each in (real, *real.parents)]
