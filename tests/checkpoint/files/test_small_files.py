"""Small files appear whole or not at all."""

import os
from pathlib import Path

import pytest

from tk.checkpoint.files import folders, small_files
from tk.core.errors import ManifestError


def test_a_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "LATEST"
    small_files.write_small(path, b"old")
    (tmp_path / "LATEST.tmp-0a1b").write_text("half-written by the same attempt")
    rename = folders.rename

    def seen(source: Path, target: Path) -> None:
        assert (source.read_bytes(), target.read_bytes()) == (b"new", b"old")
        rename(source, target)

    monkeypatch.setattr(folders, "rename", seen)
    small_files.replace_small(path, b"new", "0a1b")
    assert small_files.read_small(path, 3) == b"new"
    assert os.listdir(tmp_path) == ["LATEST"]


def test_a_file_that_is_no_small_one_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    with pytest.raises(ManifestError, match=r"file has 4 bytes; at most 3 are accepted"):
        small_files.read_small(tmp_path / "file", 3)
