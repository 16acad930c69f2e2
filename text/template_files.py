"""The chat template among a tokenizer's files."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..core.errors import CheckpointError
from .tokenizer_files import CONFIG_FILE, TEMPLATE_FILE, TOOL_TEMPLATE_FILE, TextFiles

_TOOL_USE: Final = "tool_use"  # the name of the template of conversations with tools, as in `transformers`
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateSources(NamedTuple):
    """The sources of a tokenizer's templates, in Jinja.

    Attributes:
        default: the template.
        tool_use: the template of conversations with tools; "" if it is the default one.
        variables: the special tokens by the name that the templates may use, `bos_token` for example.
    """

    default: str
    tool_use: str = ""
    variables: Mapping[str, str] = MappingProxyType({})


def template_sources(files: TextFiles) -> TemplateSources:
    """Finds chat_template.jinja, or if it does not exist, `chat_template` of tokenizer_config.json.

    Raises:
        CheckpointError: neither exists, or a file is damaged.
    """
    config = files.json(CONFIG_FILE)
    variables = special_tokens(files)
    default = files.text(TEMPLATE_FILE)
    if default is not None:
        return TemplateSources(default, files.text(TOOL_TEMPLATE_FILE) or "", variables)
    found = config.get("chat_template")
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    default = _named(named, "default")
    if default is None:
        raise CheckpointError(
            f"{files.folder} has no chat template, neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}: add "
            "one, which conversations need."
        )
    return TemplateSources(default, _named(named, _TOOL_USE) or "", variables)


def special_tokens(files: TextFiles) -> dict[str, str]:
    """Returns the special tokens of tokenizer_config.json as text, by their names there; raises as `TextFiles.json`."""
    config = files.json(CONFIG_FILE)
    found = {name: config.get(name) for name in _SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: token for name, token in texts.items() if isinstance(token, str)}


def _named(entries: list[Any], name: str) -> str | None:
    found = [entry.get("template") for entry in entries if isinstance(entry, dict) and entry.get("name") == name]
    return found[-1] if found and isinstance(found[-1], str) else None
