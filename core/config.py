"""Strict configuration sections, read from TOML with `--set section.key=value` overrides.

Every section is a pydantic model that refuses unknown keys; the error for a wrong key suggests the nearest right one.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from .errors import ConfigError


class Section(BaseModel):
    """The base of every configuration section: immutable, without unknown keys or silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _refuse_empty(path: str) -> str:
    if not path:
        raise ValueError(
            'the path is empty; leave the key out if it is optional, or write "." for the current directory'
        )
    return path


PathKey = Annotated[str, AfterValidator(_refuse_empty)]  # the value of a key that is a path
S = TypeVar("S", bound="Section")


def load_toml(path: Path, schema: type[S], overrides: Iterable[str] = ()) -> S:
    """Reads a TOML file into `schema`, after `section.key=value` overrides have replaced its values.

    Raises:
        ConfigError: the file cannot be read or does not fit the schema; the message names the file, the key and the
            values that fit.
    """
    data = read_toml(path)
    apply_overrides(data, overrides)
    return parse(data, schema, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file as plain data.

    Raises:
        ConfigError: the file cannot be read, or is not valid TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Replaces values of plain data, in place, by those of `section.key=value` overrides.

    Raises:
        ConfigError: an override does not have that form.
    """
    for override in overrides:
        _apply_override(data, override)


def parse(data: Mapping[str, Any], schema: type[S], where: str) -> S:
    """Validates plain data against `schema`; `where` names the data's origin in messages.

    Raises:
        ConfigError: the data does not fit; the message lists every problem with its key and the values that fit.
    """
    try:
        return schema.model_validate(dict(data))
    except ValidationError as error:
        found = error.errors()
        problems = "; ".join(_describe(item, schema) for item in found if not _is_consequence(item, found))
        raise ConfigError(f"{where}: {problems}{'' if problems.endswith('?') else '.'}") from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {override!r} does not have the form section.key=value.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section.")
    table[parts[-1]] = value


def _is_consequence(item: Any, found: Iterable[Any]) -> bool:
    """Returns whether an array is too short only because an entry with a problem of its own is not counted."""
    place = item["loc"]
    inside = (other["loc"] for other in found if len(other["loc"]) > len(place))
    return item["type"] == "too_short" and any(each[: len(place)] == place for each in inside)


def _describe(item: Any, schema: type[BaseModel]) -> str:
    location = [str(part) for part in item["loc"] if not str(part).startswith("<")]  # "<...>" names a union's member
    key = ".".join(location) or "the file"
    if item["type"] == "extra_forbidden":
        known = _keys_at(schema, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if item["type"] == "missing":
        return f"{key!r} is missing"
    message = str(item["msg"]).removeprefix("Value error, ").replace("valid tuple", "valid array")
    message = message[:1].lower() + message[1:]
    return f"{key!r} = {item['input']!r}: {message}" if location else message


def _keys_at(schema: type[BaseModel], path: list[str]) -> list[str]:
    """Returns the keys of the sections that `path` may lead to; numbers in `path` are array indexes."""
    schemas = [schema]
    for part in path:
        if part.isdigit():
            continue
        fields = [each.model_fields[part] for each in schemas if part in each.model_fields]
        schemas = [section for field in fields for section in _sections_in(field.annotation)]
    return list(dict.fromkeys(key for each in schemas for key in each.model_fields))


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the sections that a field may hold, directly or as members of an array or union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]
