"""Open files: what is no file is named, what is missing is known from its folder."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tk.checkpoint.files import lookup, storage
from tk.checkpoint.files.direct_writer import LARGEST
from tk.core.errors import CheckpointError, ShardMissing, StorageError
from tk.tests.checkpoint.faults import FailingSystem


def test_a_file_is_missing_only_where_the_folder_does_not_list_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with pytest.raises(ShardMissing):
        storage.open_read(path)
    assert not lookup.exists(path)
    assert lookup.list_names(path) == []
    path.parent.mkdir()
    path.write_text("")
    with FailingSystem(0, errno.ENOENT).beneath_storage():
        storage.close(storage.open_read(path))  # it was made in that moment, or is found at the second look

    def never(*_: object, **__: object) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    for look in (storage.open_read, lookup.exists, lookup.is_dir):
        with pytest.MonkeyPatch.context() as patch:
            for module in (storage, lookup):
                patch.setattr(module, "os", _Blind(never))
            with pytest.raises(StorageError, match=r"file cannot be (opened|found): No such file .*is at fault"):
                look(path)


class _Blind:
    """A system that finds nothing and lists everything."""

    def __init__(self, never: Callable[..., int]) -> None:
        self.open = self.stat = never

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def test_links_and_folders_in_place_of_a_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe", "."):
        with pytest.raises(CheckpointError, match=r"not a regular file\. Put the file itself there"):
            storage.open_read(tmp_path / name)
    assert not lookup.exists(tmp_path / "dangling")


CONTENT = np.random.default_rng(0).integers(0, 256, 3 * LARGEST, np.uint8).data


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_kernel_that_must_keep_data_in_its_cache_reads_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.preadv

    def old_kernel(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    (tmp_path / "file").write_bytes(CONTENT[:1000])
    monkeypatch.setattr(os, "preadv", old_kernel)
    into = memoryview(bytearray(900))
    with storage.reading(tmp_path / "file") as fd:
        storage.read_exact(fd, into, 100, tmp_path / "file", once=True)
    assert into == CONTENT[100:1000]


def test_an_error_in_reading_once_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").write_bytes(b"abc")
    monkeypatch.setattr(os, "preadv", broken)
    with storage.reading(tmp_path / "file") as fd, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        storage.pread(fd, memoryview(bytearray(3)), 0, once=True)
