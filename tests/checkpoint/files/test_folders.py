"""Names in folders: made durably, exchanged whole, removed without following links."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint.files import folders
from tk.core.errors import StorageError
from tk.tests.checkpoint.faults import watched


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders, each with a file of its own name."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    return tmp_path / "new", tmp_path / "old"


def test_every_missing_folder_is_made_and_its_name_made_durable(tmp_path: Path) -> None:
    log: list[tuple[str, Path]] = []

    def record(name: str, operation: Callable[..., Any], path: Path) -> Any:
        log.append((name, path.relative_to(tmp_path)))
        return operation(path)

    with watched(record, ("make_dir", "fsync_dir")):
        folders.make_dirs(tmp_path / "a" / "b")
        folders.make_dirs(tmp_path / "a" / "b")
    assert log == [
        ("make_dir", Path("a")), ("fsync_dir", Path(".")), ("make_dir", Path("a/b")), ("fsync_dir", Path("a")),
    ]  # fmt: skip


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file cannot be made: File exists \(EEXIST\)"):
        folders.make_dir(tmp_path / "file")


def test_two_folders_exchange_their_names(two: tuple[Path, Path]) -> None:
    new, old = two
    folders.swap(new, old, old.with_name("spare"))
    assert (os.listdir(old), os.listdir(new)) == (["new"], ["old"])
    assert len(os.listdir(old.parent)) == 2


def test_where_names_cannot_be_exchanged_the_old_folder_goes_by_a_spare_name(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = two
    moves: list[tuple[str, str]] = []
    rename = folders.rename

    def cannot(one: Path, other: Path) -> None:
        raise StorageError(f"{one} cannot be exchanged with {other}", errno.ENOSYS)

    def record(source: Path, target: Path) -> None:
        moves.append((source.name, target.name))
        rename(source, target)

    monkeypatch.setattr(folders, "exchange", cannot)
    monkeypatch.setattr(folders, "rename", record)
    folders.swap(new, old, old.with_name("spare"))
    assert (os.listdir(old), os.listdir(new)) == (["new"], ["old"])
    assert moves == [("old", "spare"), ("new", "old"), ("spare", "new")]


def test_a_tree_is_removed_and_the_targets_of_its_links_stay(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("years of work")
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "file").write_text("")
    (tree / "inner" / "folder").symlink_to(tmp_path / "theirs")
    (tree / "file").symlink_to(tmp_path / "theirs" / "thesis.txt")
    folders.remove_tree(tree)
    assert os.listdir(tmp_path) == ["theirs"]
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "years of work"
    for missing in (folders.remove_tree, folders.remove_file, folders.remove_dir):
        missing(tree)


def test_a_file_that_comes_while_a_tree_goes_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    remove_dir, left = folders.remove_dir, ["late"]

    def after_a_late_file(path: Path) -> None:
        if left:
            (path / left.pop()).write_text("")
        remove_dir(path)

    monkeypatch.setattr(folders, "remove_dir", after_a_late_file)
    folders.remove_tree(tree)
    assert not tree.exists()
