"""Paths that a caller gives as text: an empty one is refused, and for one that does not exist a near one is found."""

import difflib
import os
from contextlib import suppress
from pathlib import Path

from .errors import ConfigError


def as_path(given: str | os.PathLike[str]) -> Path:
    """Returns the path that a caller gives.

    Raises:
        ConfigError: it is empty, as a variable that a script did not set, or no path.
    """
    try:
        if os.fspath(given):
            return Path(given)
    except TypeError as error:
        raise ConfigError(f"The path is a {type(given).__name__}; it must be a str or a pathlib.Path.") from error
    raise ConfigError("The path is empty. Is a variable of a script not set? Write . for the current directory.")


def near_path(missing: Path) -> str:
    """Returns " Did you mean PATH?" if the folder of a path that does not exist has one of nearly its name; else ""."""
    with suppress(OSError):
        near = difflib.get_close_matches(missing.name, os.listdir(missing.parent), n=1, cutoff=0.75)
        if near:
            return f" Did you mean {missing.parent / near[0]}?"
    return ""
