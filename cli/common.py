"""What commands share: JSON output, sizes as options. Progress and words for sizes: core/progress.py."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import click

from ..core.errors import ConfigError

_FACTORS: Final[Mapping[str, int]] = MappingProxyType(
    {"": 1, "b": 1}
    | {f"{prefix}ib": 1 << 10 * power for power, prefix in enumerate("kmgtp", start=1)}
    | {prefix: 1 << 10 * power for power, prefix in enumerate("kmgtp", start=1)}
    | {f"{prefix}b": int(f"1{'000' * power}") for power, prefix in enumerate("kmgtp", start=1)}
)
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def print_json(document: Any) -> None:
    """Print one JSON document on stdout. Non-finite floats are no JSON: pass None in their place."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def parse_bytes(text: str) -> int:
    """A size in bytes from words: "2GiB", "512 MiB", "1.5G" (binary, as GiB), "10MB" (decimal), "4096".

    Raises:
        ConfigError: if the text is no size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is no size; write a number of bytes or a unit, as in 4096, 512MiB, 2GiB or 10MB")
    return round(float(match[1]) * factor)


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """An option value like 2GiB, given to the command as a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)
