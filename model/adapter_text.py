"""The tokenizer and templates in an adapter's folder.

The vocabulary must be the base's. A merged model gets the adapter's files in place of the base's. A server has one
tokenizer and one chat template for a base and all adapters beside it, so there the templates must be equal, too.
"""

from typing import Any, Final

from ..checkpoint.convert.side_files import SideFile, plan_side_files
from ..checkpoint.read import hugging_face as hf
from ..checkpoint.read.reader import Checkpoint
from ..core.errors import CheckpointError
from ..text.template_files import TemplateSources, template_sources
from ..text.tokenizer_files import CONFIG_FILE, END_FILES, TEXT_FILES, TOKENIZER_FILE, TextFiles, has_chat_template

_ADDED: Final = "added_tokens.json"


def check_vocabulary(adapter: Checkpoint, base: Checkpoint) -> None:
    """Raises CheckpointError if an adapter's folder has tokens with other ids than its base has, or others at all.

    The base's embedding has no values for them. A base without tokenizer.json allows any.
    """
    mine, theirs = (_files(checkpoint) for checkpoint in (adapter, base))
    if TOKENIZER_FILE not in theirs.contents:
        return
    if mine.contents.get(TOKENIZER_FILE) == theirs.contents[TOKENIZER_FILE]:
        return
    known, added = _vocabulary(theirs), mine.json(_ADDED)
    found = _vocabulary(mine) if TOKENIZER_FILE in mine.contents else {**known, **added}
    different = sorted(map(str, {*found.items()} ^ {*known.items()}))
    if different:
        name = TOKENIZER_FILE if TOKENIZER_FILE in mine.contents else _ADDED
        raise CheckpointError(
            f"{adapter.path / name} has another vocabulary than {base.path / TOKENIZER_FILE}: {different[0]} is in one "
            "of the two alone. Name the base that the adapter was trained on, or remove the adapter's tokenizer."
        )


def check_served_text(adapter: Checkpoint, base: Checkpoint) -> None:
    """Raises CheckpointError if an adapter's folder has another vocabulary or chat template than its base.

    A folder without any has those of the base.
    """
    check_vocabulary(adapter, base)
    mine = _templates(adapter)
    if mine is not None and mine != _templates(base):
        raise CheckpointError(
            f"{adapter.path} has a chat template of its own, and conversations are laid out by that of the base, "
            f"{base.path}, for all adapters. Put the template into the base's folder if all may use it, serve the two "
            "merged (tk export --merge), or serve a copy of the adapter without its tokenizer's files."
        )


def _templates(checkpoint: Checkpoint) -> TemplateSources | None:
    """Returns a folder's chat templates with the special tokens that they name; None if it has none."""
    files = TextFiles(checkpoint.path, checkpoint.folder.read_side_files(TEXT_FILES))
    if not has_chat_template(files):
        return None
    default, tool_use, tokens = template_sources(files)
    named = {name: token for name, token in tokens.items() if name in default + tool_use}
    return TemplateSources(default, tool_use, named)


def merged_text_files(adapter: Checkpoint, base: tuple[SideFile, ...]) -> tuple[SideFile, ...]:
    """Returns the side files of a base with an adapter's tokenizer and chat templates in place of its own.

    A whole tokenizer replaces all such files, so that no template of the base stays beside it; other files replace
    those of their name.
    """
    own = {file.name: file for file in plan_side_files(adapter) if _is_text(file.name)}
    kept = [file for file in base if file.name not in own and not (CONFIG_FILE in own and _is_text(file.name))]
    return (*kept, *own.values())


def _is_text(name: str) -> bool:
    return name.startswith(f"{hf.TEMPLATES}/") or (name in hf.SAVED_BESIDE and name not in END_FILES)


def _files(checkpoint: Checkpoint) -> TextFiles:
    return TextFiles(checkpoint.path, checkpoint.folder.read_side_files([TOKENIZER_FILE, _ADDED]))


def _vocabulary(files: TextFiles) -> dict[str, Any]:
    """Returns the id of each token of tokenizer.json."""
    document = files.json(TOKENIZER_FILE)
    try:
        vocab = document["model"]["vocab"]
        listed = enumerate(vocab) if isinstance(vocab, list) else ()  # of [token, score] pairs
        ids = {token[0]: index for index, token in listed} or dict(vocab)
        return ids | {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{files.folder / TOKENIZER_FILE} is damaged, or of an unknown kind: it has no model.vocab with tokens."
        ) from error
