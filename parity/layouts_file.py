"""A file of layouts, which a user writes or `tk parity --json` prints."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from ..core.config import parse
from ..core.errors import ConfigError
from ..core.given_files import read_given_text
from .layout import ParityLayout
from .matrix import rejection
from .subject import Subject


def read_layouts(path: Path, subject: Subject, num_ranks: int) -> tuple[ParityLayout, ...]:
    """Reads the layouts that a TOML or JSON file lists under "layouts"; `tk parity --json` prints a file like this.

    Raises:
        ConfigError: the file cannot be read or has an unknown key, or one of its layouts cannot run.
    """
    result = []
    for place, data in enumerate(_listed(path), start=1):
        where = f"{path}, layout {place}"
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {data!r} must be a table with keys like tp and zero.")
        layout = parse(data.get("layout", data), ParityLayout, where)
        reason = rejection(layout, subject, num_ranks)
        if reason:
            raise ConfigError(f"{where}: {reason}")
        result.append(layout)
    return tuple(dict.fromkeys(result))


def _listed(path: Path) -> Sequence[object]:
    try:
        text = read_given_text(path)
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"Cannot read the file of layouts {path}: {error.strerror}.") from error
    except ValueError as error:
        language = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"The file of layouts {path} is not valid {language}: {error}.") from error
    layouts = data.get("layouts") if isinstance(data, dict) else None
    if not isinstance(layouts, list) or not layouts:
        raise ConfigError(f'{path} has no list "layouts": write [[layouts]] and keys like tp = 2 below it.')
    return layouts
