"""Token folders: a round trip through preparation; every kind of damage is found and named."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tk.core.errors import ConfigError
from tk.data import prepare
from tk.data.prepare import prepare_tokens
from tk.data.token_file import FILES, TokenFile, TokenFileWriter
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


def test_large_vocabularies_take_four_bytes(byte_level: Tokenizer, tmp_path: Path) -> None:
    sizes = {1 << 16: "uint16", (1 << 16) + 1: "uint32"}
    large = Tokenizer.from_folder(byte_level.folder)
    for size, dtype in sizes.items():
        large.vocab_size = size
        with TokenFileWriter(tmp_path, large, 0) as writer:
            writer.append([size - 1, 3])
            writer.end_document()
            writer.finish()
        tokens = TokenFile(tmp_path)
        assert tokens.meta.dtype == dtype
        assert tokens.read(0, 3).tolist() == [size - 1, 3, 0]
        assert (tmp_path / "tokens.bin").read_bytes() == np.array([size - 1, 3, 0], dtype).tobytes()


@pytest.fixture
def copy(token_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(token_folder, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["tokens.bin", "index.bin", "meta.json"])
def test_missing_and_truncated_files_are_refused(copy: Path, name: str) -> None:
    whole = (copy / name).read_bytes()
    for content in (None, b"", whole[:-8], whole + b"12345678"):
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
        with pytest.raises(ConfigError) as refusal:
            TokenFile(copy)
        assert name in str(refusal.value)
        (copy / name).write_bytes(whole)
    TokenFile(copy).verify()


@pytest.mark.parametrize("name", ["tokens.bin", "index.bin"])
def test_a_flipped_bit_is_found(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        TokenFile(copy).verify()


def test_falling_offsets_are_refused(copy: Path) -> None:
    offsets = np.fromfile(copy / "index.bin", "<i8")
    offsets[[3, 4]] = offsets[[4, 3]]
    offsets.tofile(copy / "index.bin")
    with pytest.raises(ConfigError, match=r"index\.bin is damaged"):
        TokenFile(copy)


def test_ids_outside_the_vocabulary_are_refused_when_read(copy: Path) -> None:
    tokens = np.fromfile(copy / "tokens.bin", "<u2")
    tokens[100] = 1000
    tokens.tofile(copy / "tokens.bin")
    opened = TokenFile(copy)
    assert opened.read(0, 100).max() < 1000
    with pytest.raises(ConfigError, match="token 100 is 1000"):
        opened.read(50, 150)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_tokens": 7}, "fingerprint"),
        ({"num_tokens": "7"}, "must have exactly the fields"),
        ({"num_tokens": True}, "must have exactly the fields"),
        ({"more": 1}, "must have exactly the fields"),
        ({"version": 2}, "has version 2, but this tk reads version 1"),
        ({"format": "other"}, "does not describe"),
    ],
)
def test_a_changed_description_is_refused(copy: Path, change: dict[str, object], said: str) -> None:
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(ConfigError, match=said):
        TokenFile(copy)


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
