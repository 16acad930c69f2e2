"""The tokenizer and templates in an adapter's folder: used in place of the base's, if the vocabulary is the same."""

from typing import Any, Final

from ..checkpoint.convert.side_files import SideFile, plan_side_files
from ..checkpoint.read import hugging_face as hf
from ..checkpoint.read.reader import Checkpoint
from ..core.errors import CheckpointError
from ..text.tokenizer_files import CONFIG_FILE, END_FILES, TOKENIZER_FILE, TextFiles

_ADDED: Final = "added_tokens.json"


def check_vocabulary(adapter: Checkpoint, base: Checkpoint) -> None:
    """Raises CheckpointError if an adapter's folder has tokens with other ids than its base has, or others at all.

    The base's embedding has no values for them. A base without tokenizer.json allows any.
    """
    mine, theirs = (_files(checkpoint) for checkpoint in (adapter, base))
    if TOKENIZER_FILE not in theirs.contents:
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
