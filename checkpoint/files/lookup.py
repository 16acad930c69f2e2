"""What is there: files, folders and links by their paths, and the names in a folder.

A path is missing only if the folder above does not list it: a network file system may fail to find what is there.
"""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from .storage_errors import error_context

PAUSES: Final = (0.0, 0.01, 0.1)  # seconds between looks at what may be changing

_Found = TypeVar("_Found")


def exists(path: Path) -> bool:
    """Whether there is a file or folder, at a link's end too."""
    return _status(path) is not None


def is_dir(path: Path) -> bool:
    """Whether there is a folder, at a link's end too."""
    found = _status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_link(path: Path) -> bool:
    """Whether there is a link, whatever is at its end."""
    with error_context(path, "found"):
        found = find(path, lambda: os.lstat(path))
    return found is not None and stat.S_ISLNK(found.st_mode)


def list_names(path: Path) -> list[str]:
    """Names in a folder, sorted; none if there is no such folder."""
    with error_context(path, "listed"):
        return sorted(find(path, lambda: os.listdir(path)) or ())


def _status(path: Path) -> os.stat_result | None:
    with error_context(path, "found"):
        return find(path, lambda: os.stat(path))


def find(path: Path, call: Callable[[], _Found]) -> _Found | None:
    """The call's answer; None if there is no such path, as the folder above confirms."""
    for pause in PAUSES:
        try:
            return call()
        except (FileNotFoundError, NotADirectoryError):
            if _is_absent(path):
                return None
        time.sleep(pause)  # made or moved in the meantime
    return call()


def _is_absent(path: Path) -> bool:
    """Whether the folder above does not list a path, or is none; or whether it is a link to nothing."""
    above = path.parent
    try:
        if path.name not in os.listdir(above):
            return True
    except FileNotFoundError:
        return above != path and _is_absent(above)
    except NotADirectoryError:
        return not stat.S_ISDIR(os.stat(above).st_mode)
    return os.path.islink(path)
