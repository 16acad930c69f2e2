"""The folders that may hold built libraries: the user's cache, a private temporary folder, and that of an image."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from .library_folder import LibraryFolder
from .trust import Untrusted, open_folder

PREBUILT_VARIABLE: Final = "TK_KERNELS"


def prebuilt_folder() -> LibraryFolder | None:
    """Returns the folder that $TK_KERNELS names, which `tk doctor --build` filled; None if it names none.

    Its libraries may be root's: an image is built by root and run by another user. It may be a link.
    """
    name = os.environ.get(PREBUILT_VARIABLE)
    return LibraryFolder(Path(os.path.realpath(name)), frozenset({0, os.geteuid()})) if name else None


def candidates() -> Iterator[Path]:
    """Yields the folders to keep libraries in, the preferred first; none of them need exist."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if os.path.isabs(cache):  # the specification says to ignore others
        yield Path(cache, "tk", "native")
    elif os.path.isabs(home):
        yield Path(home, ".cache", "tk", "native")
    with suppress(FileNotFoundError):  # no temporary folder can be written
        yield Path(tempfile.gettempdir(), f"tk-native-{os.geteuid()}")


def make_cache_folder(path: Path) -> LibraryFolder:
    """Returns one of the candidates as a folder of this user; makes it and the folders above it, with mode 0700.

    Raises:
        Untrusted: the folder is another user's, or others may write it; or it would be made in another user's folder.
        OSError: it cannot be made.
    """
    for folder in reversed(_missing(path)):
        folder.mkdir(mode=0o700, exist_ok=True)
    owners = frozenset({os.geteuid()})
    os.close(open_folder(path, owners))
    return LibraryFolder(path, owners)


def why_unusable(path: Path) -> str:
    """Returns the reason why no library can be kept in one of the candidates; "" if one can. Makes nothing."""
    try:
        missing = _missing(path)
        if not missing:
            os.close(open_folder(path, frozenset({os.geteuid()})))
    except (Untrusted, OSError) as error:
        return str(error)
    place = missing[-1].parent if missing else path
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written by this user."


def _missing(path: Path) -> list[Path]:
    """Returns the folders that do not exist, the innermost first.

    Raises:
        Untrusted: they would be made in another user's folder.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    if missing:
        owner, user = missing[-1].parent.stat().st_uid, os.geteuid()
        if owner not in (0, user):  # root with the HOME of a user: its files would lock the user out
            raise Untrusted(f"{missing[-1].parent} belongs to the user {owner}, and this process runs as {user}.")
    return missing
