"""Strict configuration sections, read from TOML with `--set section.key=value` overrides.

Every section is a pydantic model that refuses unknown keys; the error for a wrong key suggests the nearest right one.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from .errors import ConfigError
from .given_files import read_given
from .not_toml import parse_toml, unreadable


class Section(BaseModel):
    """The base of every configuration section: immutable, without unknown keys or silent conversions.

    Attributes:
        other_names: names of other programs for its keys, and for each the key, or a sentence if there is none.
    """

    other_names: ClassVar[Mapping[str, str]] = MappingProxyType({})

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _refuse_empty(path: str) -> str:
    if not path:
        raise ValueError(
            'the path is empty; leave the key out if it is optional, or write "." for the current directory'
        )
    return path


PathKey = Annotated[str, AfterValidator(_refuse_empty)]  # the value of a key that is a path
S = TypeVar("S", bound="Section")
_VALUE: Final = re.compile(r"[-+]?[\d_]*\.?\d+([eE][-+]?\d+)?|true|false", re.IGNORECASE)


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
        return parse_toml(read_given(path), str(path))
    except OSError as error:
        raise unreadable(path, error) from error


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
        problems = "; ".join(_describe(item, schema) for item in error.errors())
        raise ConfigError(f"{where}: {problems}{'' if problems.endswith('?') else '.'}") from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {override!r} does not have the form section.key=value, as in --set train.steps=50.")
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


def _describe(item: Any, schema: type[Section]) -> str:
    location = [str(part) for part in item["loc"] if not str(part).startswith("<")]  # "<...>" names a union's member
    key = ".".join(location) or "the file"
    if item["type"] == "extra_forbidden":
        known = _keys_at(schema, location[:-1])
        return f"unknown key {key!r}; {_hint(schema, location[-1], known)}"
    if item["type"] == "missing":
        return f"{key!r} is missing"
    message = str(item["msg"]).removeprefix("Value error, ").replace("valid tuple", "valid array")
    message = message[:1].lower() + message[1:]
    if not location or isinstance(item["input"], Mapping | BaseModel):  # a whole section says nothing
        return f"{key!r}: {message}" if location else message
    return f"{key!r} = {item['input']!r}: {message}{_about_quotes(item)}"


def _about_quotes(item: Any) -> str:
    """Returns what to do about a number or a truth value in quotes, and about a text without; "" for other problems."""
    given, kind = item["input"], item["type"]
    if kind == "string_type":
        return f', so put it in quotes ("{given}")'
    if isinstance(given, str) and kind in ("int_type", "float_type", "bool_type") and _VALUE.fullmatch(given):
        return f", so write it without quotes ({given.lower()})"
    return ""


def key_named(schema: type[Section], name: str) -> str:
    """Returns the key, section first, that has a name or that other programs give the name; "" if there is none."""
    found = [f"{section}.{name}" for section in schema.model_fields if name in _keys_at(schema, [section])]
    other = schema.other_names.get(name, "")
    return found[0] if found else "" if " " in other else other


def _hint(schema: type[Section], name: str, known: Sequence[str]) -> str:
    """Returns the key that was meant by an unknown name, or else all that are known in its place."""
    other = schema.other_names.get(name, "")
    if " " in other:
        return other
    meant = key_named(schema, name)
    near = [meant] if meant else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"


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
