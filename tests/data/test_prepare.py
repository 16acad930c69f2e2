"""Preparation: documents come back whole from a token folder, and a folder that tk did not write is kept."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.data import prepare
from tk.data.prepare import prepare_tokens
from tk.data.token_file import FILES, TokenFile
from tk.text.tokenizer import Tokenizer


def test_documents_come_back(documents: list[str], token_folder: Path, byte_level: Tokenizer) -> None:
    tokens = TokenFile(token_folder)
    tokens.verify()
    assert (tokens.meta.num_documents, tokens.meta.dtype, tokens.meta.vocab_size) == (len(documents), "uint16", 1000)
    offsets = tokens.document_offsets
    for number, text in enumerate(documents):
        ids = tokens.read(offsets[number], offsets[number + 1]).tolist()
        assert ids == [*byte_level.encode(text), 0]
        assert byte_level.decode(ids) == text
    assert Tokenizer.from_folder(token_folder).sha256 == byte_level.sha256 == tokens.meta.tokenizer_sha256


def test_the_same_documents_make_the_same_files(
    token_folder: Path, documents: list[str], make_tokens: Callable[[Sequence[str]], Path]
) -> None:
    again = make_tokens(documents)
    for name in ("tokens.bin", "index.bin", "meta.json"):
        assert (again / name).read_bytes() == (token_folder / name).read_bytes()
    changed = TokenFile(make_tokens([*documents[:-1], documents[-1] + "\n"]))
    assert changed.meta.fingerprint != TokenFile(token_folder).meta.fingerprint


def test_documents_start_and_end_as_prompts_do(byte_fallback: Tokenizer, tmp_path: Path) -> None:
    tokens = prepare_tokens(["a b", "c"], byte_fallback, tmp_path / "tokens")
    assert tokens.read(0, tokens.meta.num_tokens).tolist() == [
        *byte_fallback.encode("a b"),
        2,
        *byte_fallback.encode("c"),
        2,
    ]


def test_a_long_document_stays_one(byte_level: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 70)
    texts = ["word word\n" * 40 + "x" * 230, "short", "y" * 50, "z" * 51]
    tokens = prepare_tokens(texts, byte_level, tmp_path / "tokens")
    assert tokens.meta.num_documents == 4
    pieces = zip(tokens.document_offsets[:-1], tokens.document_offsets[1:], strict=True)
    assert [byte_level.decode(tokens.read(*piece).tolist()) for piece in pieces] == texts


def test_an_existing_folder_is_kept_unless_tk_wrote_it(
    token_folder: Path, byte_level: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare_tokens(["first"], byte_level, out)
    with pytest.raises(ConfigError, match="exists already"):
        prepare_tokens(["second"], byte_level, out)
    first = TokenFile(out).meta
    with pytest.raises(ConfigError, match="no text"):
        prepare_tokens([], byte_level, out, FILES)
    assert TokenFile(out).meta == first, "a failed replacement changes nothing"
    assert prepare_tokens(["second one"], byte_level, out, FILES).meta != first
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        prepare_tokens(["third"], byte_level, out, FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no temporary folder must remain"


def test_a_tokenizer_without_an_end_is_refused(byte_level_folder: Path, tmp_path: Path) -> None:
    shutil.copy(byte_level_folder / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match="eos_token"):
        prepare_tokens(["text"], Tokenizer.from_folder(tmp_path), tmp_path / "tokens")
