"""Why a text is no TOML, in the words of a user who wrote another language, or a text as no language has it."""

import codecs
import re
import tomllib
from pathlib import Path
from typing import Final

from .errors import ConfigError
from .given_paths import near_path

_MARKS_OF_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_YAML: Final = re.compile(r"^(---|\s*(- )?[\w.-]+:(\s|$))", re.MULTILINE)
_FORM: Final = "A section is a line such as [train], and a key below it a line such as steps = 20"


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Returns the error for a file of TOML that the system does not read."""
    if isinstance(error, IsADirectoryError):
        advice = "Name the TOML file, not its folder."
    elif isinstance(error, FileNotFoundError):
        advice = near_path(path).lstrip() or "Name a TOML file that is there; `tk init` writes one."
    else:
        advice = "This user must be allowed to read it."
    return ConfigError(f"Cannot read the configuration {path}: {error.strerror}. {advice}")


def parse_toml(data: bytes, name: str) -> dict[str, object]:
    """Returns the content of a TOML file, which some editors begin with a byte order mark.

    Args:
        data: the bytes of the file.
        name: the file's name, for messages.

    Raises:
        ConfigError: it is not valid TOML; the message says which other language it is, if it is one of the usual ones.
    """
    if data.startswith(_MARKS_OF_UTF_16):
        raise ConfigError(
            f"{name} is not valid TOML: it is UTF-16 text, as PowerShell writes it. Convert it to UTF-8 "
            "(iconv -f UTF-16 -t UTF-8)."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: byte {error.start} is not UTF-8. Convert it to UTF-8.") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}. {_advice(text, str(error))}") from error


def _advice(text: str, problem: str) -> str:
    """Returns what would be right."""
    if text.lstrip().startswith("{"):
        return f"It looks like JSON. {_FORM}."
    if _YAML.search(text):
        return f"It looks like YAML. {_FORM}."
    if problem.startswith("Invalid value"):
        return 'A text stands in quotes (dir = "runs/tiny"); true and false are in lower case.'
    if problem.startswith(("Cannot overwrite", "Cannot declare")):
        return "The key or section stands there twice: remove one of them."
    return f"{_FORM}."
