"""Paths that a caller gives as text: an empty one is refused, which pathlib would take for the current directory."""

import os
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
