"""A draft model before it is loaded: its options, and whether it can propose tokens of the served model."""

from typing import Any

from ....core.errors import ConfigError
from ....core.given_paths import as_path
from ....text.tokenizer_files import TOKENIZER_FILE, TextFiles
from ..options import EngineOptions


def draft_options(options: EngineOptions) -> EngineOptions | None:
    """Returns the options of a draft, which one process computes; None without one.

    Its cache has the blocks of the served model's, in its own dtype.

    Args:
        options: those of the engine that it belongs to.
    """
    if options.draft is None:
        return None
    return EngineOptions(
        as_path(options.draft),
        dtype=options.dtype,
        weight_dtype=options.draft_weight_dtype,
        kv_blocks=1,  # until the blocks of the served model are known, of which it has as many
        kernels=options.kernels,
        threads=None if options.threads is None else options.threads * options.tp,
        packed=options.packed,
        block_size=options.block_size,
        max_running=options.max_running,
        max_batched_tokens=options.max_batched_tokens,
        start_timeout=options.start_timeout,
    )


def check_same_tokens(draft: TextFiles, model: TextFiles, vocab_sizes: tuple[int, int]) -> None:
    """Checks that a draft's tokens are the model's.

    Args:
        draft, model: the files of both.
        vocab_sizes: the numbers of tokens of their vocabularies, that of the draft first.

    Raises:
        ConfigError: a number or a tokenizer differs, by the names of their folders.
    """
    of_draft, of_model = vocab_sizes
    if of_draft != of_model:
        raise ConfigError(
            f"The draft {draft.folder} has a vocabulary of {of_draft} tokens, and {model.folder} one of {of_model}. "
            "Choose a draft that was trained with the model's tokenizer."
        )
    if _tokenizer(draft) != _tokenizer(model):
        raise ConfigError(
            f"{TOKENIZER_FILE} of the draft {draft.folder} is not that of {model.folder}, so its tokens mean other "
            "texts. Choose a draft that was trained with the model's tokenizer."
        )


def _tokenizer(files: TextFiles) -> dict[str, Any]:
    """Returns what turns texts into tokens, {} without a tokenizer; how the file is written does not count."""
    return {name: part for name, part in files.json(TOKENIZER_FILE).items() if name not in ("truncation", "padding")}
