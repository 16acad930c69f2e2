"""Fixtures: the small corpus as tokens, and token folders of given documents."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tk.data.prepare import prepare_tokens
from tk.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def token_folder(documents: list[str], byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token folder of the small corpus, which tests must not change."""
    folder = tmp_path_factory.mktemp("tokens") / "library"
    prepare_tokens(documents, byte_level, folder)
    return folder


@pytest.fixture(scope="session")
def make_tokens(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Path]:
    """A function that makes a token folder of given documents."""

    def make(texts: Sequence[str]) -> Path:
        folder = tmp_path_factory.mktemp("made") / "tokens"
        prepare_tokens(texts, byte_level, folder)
        return folder

    return make
