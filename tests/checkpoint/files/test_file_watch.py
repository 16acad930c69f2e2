"""A watch finds that a file was written, replaced or removed, with its times set back too, and names it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.checkpoint.files.file_watch import FileWatch
from tk.core.errors import CheckpointError


def rewrite(path: Path) -> None:
    path.write_bytes(b"new")
    os.utime(path, ns=(10**18, 10**18))


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(b"old")
    os.replace(path.with_name("other"), path)


@pytest.mark.parametrize("change", [rewrite, replace, Path.unlink, lambda path: path.write_bytes(b"longer")])
def test_each_change_is_found(tmp_path: Path, change: Callable[[Path], object]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_bytes(b"old")
        os.utime(path, ns=(10**18, 10**18))
    watch = FileWatch.of(one, tmp_path / "missing") | FileWatch.of(two)
    watch.require_unchanged()
    while os.stat(one).st_ctime_ns == os.stat(tmp_path).st_ctime_ns:  # one tick of the kernel's clock
        (tmp_path / "tick").write_bytes(b"")
        (tmp_path / "tick").unlink()
    change(two)
    with pytest.raises(CheckpointError, match=f"{two} was replaced or changed while it was read"):
        watch.require_unchanged()
