"""Files that must stay as they are while a source without checksums is read: another program may write in them."""

from collections.abc import Mapping
from pathlib import Path

from ...core.errors import CheckpointError, ShardMissing
from . import storage
from .storage import FileState


class FileWatch:
    """The states of some files at one moment.

    A file that is overwritten in place shows neither to a reader that has opened it, nor in a checksum that is taken of
    what was read: half of the values may be old and half new. Its state shows it, compared after the last read.
    """

    def __init__(self, states: Mapping[Path, FileState]) -> None:
        self._states = dict(states)

    @staticmethod
    def of(*paths: Path) -> "FileWatch":
        """Looks at those of the files that exist."""
        found = {}
        for path in paths:
            try:
                found[path] = storage.state_of(path)
            except ShardMissing:
                continue
        return FileWatch(found)

    def __or__(self, other: "FileWatch") -> "FileWatch":
        """Returns the watch of the files of both."""
        return FileWatch(self._states | other._states)

    def require_unchanged(self) -> None:
        """Raises CheckpointError, naming the file, if one was written, replaced or removed since it was looked at."""
        for path, state in self._states.items():
            try:
                same = storage.state_of(path) == state
            except ShardMissing:
                same = False
            if not same:
                raise changed_while_read(path)


def changed_while_read(path: Path) -> CheckpointError:
    """Makes the error for a file that another program writes while it is read."""
    return CheckpointError(
        f"{path} was replaced or changed while it was read, so what was read may be half old and half new. Run the "
        "command again when no program writes there."
    )
