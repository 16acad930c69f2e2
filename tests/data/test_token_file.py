"""Token folders: ids and masks are read as they were written, and every kind of damage is found and named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tk.core.errors import ConfigError
from tk.data.token_file import TokenFile, TokenFileWriter
from tk.text.tokenizer import Tokenizer


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


def test_a_folder_without_tokens_is_refused(copy: Path) -> None:
    meta = TokenFile(copy).meta
    (copy / "tokens.bin").write_bytes(b"")
    (copy / "meta.json").write_text(json.dumps(replace(meta, num_tokens=0).to_json()))
    with pytest.raises(ConfigError, match=r"tokens\.bin is empty: there is nothing to train on"):
        TokenFile(copy)


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


def test_texts_before_the_first_example_count_as_a_whole(byte_level: Tokenizer, tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path, byte_level, 0) as writer:
        writer.append([5, 6])
        writer.end_document()
        writer.add_example([7, 8], [False, True])
        writer.append([9])
        writer.end_document()
        meta = writer.finish()
    tokens = TokenFile(tmp_path)
    tokens.verify()
    assert tokens.read(0, 7).tolist() == [5, 6, 0, 7, 8, 9, 0]
    assert tokens.learned(0, 7).tolist() == [True, True, True, False, True, True, True]
    mask = (tmp_path / "mask.bin").read_bytes()
    (tmp_path / "mask.bin").write_bytes(mask[:-1])
    with pytest.raises(ConfigError, match=r"mask\.bin has 6 bytes"):
        TokenFile(tmp_path)
    (tmp_path / "mask.bin").write_bytes(mask[:3] + b"\1" + mask[4:])
    with pytest.raises(ConfigError, match=r"mask\.bin is damaged"):
        TokenFile(tmp_path).verify()
    assert meta.fingerprint == tokens.fingerprint


def test_the_mask_is_part_of_the_fingerprint(byte_level: Tokenizer, tmp_path: Path) -> None:
    found = set()
    for number, learned in enumerate(([True, True], [False, True], None)):
        (tmp_path / str(number)).mkdir()
        with TokenFileWriter(tmp_path / str(number), byte_level, 0) as writer:
            if learned:
                writer.add_example([7, 0], learned)
            else:
                writer.append([7])
                writer.end_document()
            writer.finish()
        tokens = TokenFile(tmp_path / str(number))
        assert tokens.masked == (learned is not None)
        found.add(tokens.fingerprint)
    assert len(found) == 3
