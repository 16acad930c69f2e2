"""The files of a chat template in a tokenizer's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..core.errors import CheckpointError
from .tokenizer_files import CONFIG_FILE, TEMPLATE_FILE

_TOOL_USE: Final = "tool_use"  # the name of the template of conversations with tools, as in `transformers`
_TOOL_FILE: Final = f"additional_chat_templates/{_TOOL_USE}.jinja"


class TemplateSources(NamedTuple):
    """The sources of a folder's templates, in Jinja.

    Attributes:
        default: the template.
        tool_use: the template of conversations with tools; "" if it is the default one.
    """

    default: str
    tool_use: str


def read_template_sources(folder: Path, config: Mapping[str, Any]) -> TemplateSources:
    """Reads chat_template.jinja, or if it does not exist, `chat_template` of tokenizer_config.json.

    Args:
        folder: the tokenizer's folder.
        config: its tokenizer_config.json.

    Raises:
        CheckpointError: neither exists.
    """
    if (folder / TEMPLATE_FILE).is_file():
        tool_use = _read(folder / _TOOL_FILE) if (folder / _TOOL_FILE).is_file() else ""
        return TemplateSources(_read(folder / TEMPLATE_FILE), tool_use)
    found = config.get("chat_template")
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    default = _named(named, "default")
    if default is None:
        raise CheckpointError(
            f"{folder} has no chat template, neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}: add one, "
            "which conversations need."
        )
    return TemplateSources(default, _named(named, _TOOL_USE) or "")


def _named(entries: list[Any], name: str) -> str | None:
    found = [entry.get("template") for entry in entries if isinstance(entry, dict) and entry.get("name") == name]
    return found[-1] if found and isinstance(found[-1], str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
