"""The folders that `--force` may replace: a checkpoint in which every file is known to belong to it."""

import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...core.errors import CheckpointError, ConfigError
from ...core.file_names import some_names
from ..files import lookup, small_files, storage
from ..format.manifest import PARTS
from ..read.hugging_face import MAX_SIDE_FILE, TEMPLATES
from ..read.locate import open_folder


class ReplaceableFolder:
    """A folder that a copy with `--force` replaces. It is read again only if a file has changed.

    Args:
        path: the folder.
        renewed: returns the paths of files that the copy writes, by name. A file that is equal to one of them, as a
            model card that an earlier export wrote, is no loss.
    """

    def __init__(self, path: Path, renewed: Callable[[], Mapping[str, Path]]) -> None:
        self._path, self._renewed = path, renewed
        self._states: Sequence[tuple[int, ...]] = ()  # of the files, when `_known` was read
        self._known: frozenset[str] = frozenset()

    def files(self) -> tuple[str, ...]:
        """Returns the files in the folder, relative to it, if it is a complete checkpoint and holds nothing else.

        Raises:
            ConfigError: the folder does not open as a checkpoint, its metadata does not hold every tensor exactly once,
                or it holds other files that the copy does not write again; the message names the first few.
        """
        names = tuple(_names(self._path))
        found = {name: (self._path / name).lstat() for name in names}
        states = [
            (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found.values()
        ]
        if not self._known or states != self._states:
            own = _checkpoint_files(self._path, names)
            others = [name for name in names if name not in own and stat.S_ISREG(found[name].st_mode)]
            self._known, self._states = own | self._equal(others), states
        foreign = [name for name in names if name not in self._known or not stat.S_ISREG(found[name].st_mode)]
        if foreign:
            raise ConfigError(
                f"{self._path} exists and holds more than a checkpoint, so it is not replaced: {some_names(foreign)}. "
                "Name another folder, or move those files away."
            )
        return names

    def _equal(self, names: Sequence[str]) -> frozenset[str]:
        """Returns those of the names whose file is equal to the one that the copy writes."""
        renewed = self._renewed() if names else {}
        return frozenset(name for name in names if name in renewed and _are_equal(self._path / name, renewed[name]))


def _are_equal(one: Path, other: Path) -> bool:
    size = storage.state_of(one).size
    if size != storage.state_of(other).size or size > MAX_SIDE_FILE:
        return False
    return small_files.read_small(one, size) == small_files.read_small(other, size)


def _checkpoint_files(folder: Path, names: Sequence[str]) -> frozenset[str]:
    """Returns the names of a complete checkpoint's own files; `names` are those in the folder, for messages."""
    try:
        checkpoint = open_folder(folder)
        if checkpoint:
            checkpoint.check()
        known = frozenset(checkpoint.removable_files() if checkpoint else ())
    except CheckpointError as error:
        raise ConfigError(
            f"{folder} exists, holds {some_names(names)} and does not open as a checkpoint, so it is not replaced "
            f"({error}) Name another folder, or remove that one yourself."
        ) from error
    if checkpoint is None:
        raise ConfigError(
            f"{folder} exists and is no checkpoint, so it is not replaced: it holds {some_names(names)}; name another."
        )
    return known


def _names(folder: Path) -> list[str]:
    """Returns the names in a folder, and in the folders that a checkpoint may have: parts/ and the one of templates."""
    found = []
    for name in lookup.list_names(folder):
        has_own = name in (PARTS, TEMPLATES) and not (folder / name).is_symlink()
        inner = lookup.list_names(folder / name) if has_own else []
        found += [f"{name}/{each}" for each in inner] or [name]
    return found
