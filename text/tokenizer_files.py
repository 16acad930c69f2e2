"""The files of a tokenizer in a model folder: their names, and their content as it was read once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..core.errors import CheckpointError

# The files of a tokenizer in a model folder, which every copy of the model gets too; only the first must exist.
TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
SIDE_FILES: Final = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE)
TOOL_TEMPLATE_FILE: Final = "additional_chat_templates/tool_use.jinja"
# The files whose `eos_token_id` ends generation.
END_FILES: Final = ("config.json", "generation_config.json")
TEXT_FILES: Final = (*SIDE_FILES, TOOL_TEMPLATE_FILE, "chat_template.json", *END_FILES)


@dataclass(frozen=True)
class TextFiles:
    """The files of a model folder that decide how texts become tokens and which tokens end them, as they were read.

    Who holds them answers alike for ever, whatever becomes of the folder.

    Attributes:
        folder: where they were read; nothing is read there again.
        contents: the content of each of `TEXT_FILES` that exists.
    """

    folder: Path
    contents: Mapping[str, bytes]

    @staticmethod
    def read(folder: Path) -> "TextFiles":
        """Reads the files of a folder; raises CheckpointError if the system cannot read one."""
        contents = {}
        for name in TEXT_FILES:
            try:
                contents[name] = (folder / name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise CheckpointError(f"Cannot read {folder / name}: {error.strerror}.") from error
        return TextFiles(folder, contents)

    def without(self, name: str) -> "TextFiles":
        """Returns all files but one."""
        return TextFiles(self.folder, {key: data for key, data in self.contents.items() if key != name})

    def text(self, name: str) -> str | None:
        """Returns a file as text, None if it does not exist; raises CheckpointError if it is not UTF-8."""
        data = self.contents.get(name)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"Cannot read {self.folder / name}: it is not UTF-8.") from error

    def json(self, name: str) -> dict[str, Any]:
        """Returns a file as a JSON object; {} if it does not exist.

        Raises:
            CheckpointError: the file holds no JSON object.
        """
        path, text = self.folder / name, self.text(name)
        if text is None:
            return {}
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"Cannot read {path}: {error}.") from error
        if not isinstance(document, dict):
            raise CheckpointError(f"{path} must hold a JSON object, not {type(document).__name__}.")
        return document


def eos_token_ids_of(files: TextFiles) -> frozenset[int]:
    """Returns the ids that end generation, the `eos_token_id` of config.json and of generation_config.json.

    Raises:
        CheckpointError: a file is damaged, or its value is neither an id, a list of ids, nor null.
    """
    found: set[int] = set()
    for name in END_FILES:
        value = files.json(name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise CheckpointError(
                f"{files.folder / name}: eos_token_id is {value!r}; it must be an id, a list of ids, or null."
            )
        found.update(ids)
    return frozenset(found)


def has_chat_template(files: TextFiles) -> bool:
    """Returns whether a tokenizer's files have a chat template, which may still be a wrong one.

    Raises:
        CheckpointError: the tokenizer's configuration is damaged.
    """
    return TEMPLATE_FILE in files.contents or bool(files.json(CONFIG_FILE).get("chat_template"))
