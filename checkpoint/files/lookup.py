"""Questions about paths: whether a file, folder or link exists, and the names in a folder.

A path counts as missing only if its parent does not list it: a network file system may fail to find an existing file.
"""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from .storage_errors import error_context

PAUSES: Final = (0.0, 0.01, 0.1)  # seconds between attempts, while another process may be changing the folder

_Found = TypeVar("_Found")


def exists(path: Path) -> bool:
    """Returns whether a file or folder exists; links are followed."""
    return _status(path) is not None


def is_dir(path: Path) -> bool:
    """Returns whether a folder exists; links are followed."""
    found = _status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_link(path: Path) -> bool:
    """Returns whether the path is a link, dangling or not."""
    with error_context(path, "found"):
        found = find(path, lambda: os.lstat(path))
    return found is not None and stat.S_ISLNK(found.st_mode)


def list_names(path: Path) -> list[str]:
    """Returns the names in a folder, sorted; [] if the folder does not exist."""
    with error_context(path, "listed"):
        return sorted(find(path, lambda: os.listdir(path)) or ())


def _status(path: Path) -> os.stat_result | None:
    with error_context(path, "found"):
        return find(path, lambda: os.stat(path))


def find(path: Path, call: Callable[[], _Found]) -> _Found | None:
    """Returns the call's result; None if the path does not exist, which its parent's listing confirms."""
    for pause in PAUSES:
        try:
            return call()
        except (FileNotFoundError, NotADirectoryError):
            if _is_absent(path):
                return None
        time.sleep(pause)  # the path was made or moved in the meantime
    return call()


def _is_absent(path: Path) -> bool:
    """Returns whether the parent does not list a path or is no folder, or the path is a dangling link."""
    above = path.parent
    try:
        if path.name not in os.listdir(above):
            return True
    except FileNotFoundError:
        return above != path and _is_absent(above)
    except NotADirectoryError:
        return not stat.S_ISDIR(os.stat(above).st_mode)
    return os.path.islink(path)
