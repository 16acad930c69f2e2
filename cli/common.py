"""JSON output, and paths and sizes as options, shared by commands. core/progress.py has progress bars."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from ..core.errors import ConfigError
from ..core.given_paths import as_path

_FACTORS: Final[Mapping[str, int]] = MappingProxyType(
    {"": 1, "b": 1}
    | {f"{prefix}ib": 1 << 10 * power for power, prefix in enumerate("kmgtp", start=1)}
    | {prefix: 1 << 10 * power for power, prefix in enumerate("kmgtp", start=1)}
    | {f"{prefix}b": int(f"1{'000' * power}") for power, prefix in enumerate("kmgtp", start=1)}
)
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def print_json(document: Any) -> None:
    """Prints one JSON document on stdout.

    Raises:
        ValueError: `document` has a float that is not finite, which JSON cannot express; None can take its place.
    """
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def parse_bytes(text: str) -> int:
    """Returns the bytes of a size: "2GiB", "512 MiB", "1.5G" (binary, like GiB), "10MB" (decimal), "4096".

    Raises:
        ConfigError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{text!r} is not a size: write a number of bytes, or one with a unit, as in 4096, 512MiB, 2GiB or 10MB."
        )
    return round(float(match[1]) * factor)


class PathType(click.Path):
    """The type of an argument or option that is a path: click's, but an empty text is not the current directory.

    A script passes an empty text for a variable that is not set.
    """

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        try:
            as_path(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


PATH: Final = PathType(path_type=Path)
PATH_TEXT: Final = PathType(path_type=str)  # of a path that a word, or the address of a server, can replace


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """The type of an option with a value like 2GiB, which the command receives as a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)
