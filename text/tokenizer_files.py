"""The files of a tokenizer in a model folder: their names, and the JSON among them."""

import json
from pathlib import Path
from typing import Any, Final

from ..core.errors import CheckpointError

# The files of a tokenizer in a model folder, which every copy of the model gets too; only the first must exist.
TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
SIDE_FILES: Final = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE)


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Returns the ids that end generation, the `eos_token_id` of config.json and of generation_config.json.

    Raises:
        CheckpointError: a file is damaged, or its value is neither an id, a list of ids, nor null.
    """
    found: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        value = read_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise CheckpointError(f"{path}: eos_token_id is {value!r}; it must be an id, a list of ids, or null.")
        found.update(ids)
    return frozenset(found)


def has_chat_template(folder: Path) -> bool:
    """Returns whether a tokenizer's folder has a chat template, which may still be a wrong one.

    Raises:
        CheckpointError: the tokenizer's configuration is damaged.
    """
    return (folder / TEMPLATE_FILE).is_file() or bool(read_json(folder / CONFIG_FILE).get("chat_template"))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; {} if the file does not exist.

    Raises:
        CheckpointError: the file cannot be read, or holds no JSON object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(document).__name__}.")
    return document
