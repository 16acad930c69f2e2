"""A folder that appears whole: what dead and living jobs left, what comes meanwhile, and what stays."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, Options, prepare_reshard
from tk.checkpoint.files import folders
from tk.checkpoint.files.whole_folder import whole_folder
from tk.cli.main import main
from tk.core.errors import CheckpointError, ConfigError, StorageError
from tk.core.layout import Layout
from tk.tests.checkpoint.places import reshard, tree

NAMES = (
    "two\nlines", "\N{SAUROPOD}", "-rf", b"\xff\xfe".decode(errors="surrogateescape"), "x" * 255, "end  ", "a'\"$(b)",
    "%s{0}", ".hidden", "new.tk-target-0123abcd",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_is_made_and_replaced(place: Path, name: str) -> None:
    target, before = place / name, {*os.listdir(place), name}
    for force, code in (([], 0), (["--force"], 0), ([], 2)):
        assert main(["reshard", str(place / "run"), "--tp", "1", *force, "--", str(target)]) == code
    assert Checkpoint.open(target).verify().ok
    assert set(os.listdir(place)) == before


def test_a_folder_that_only_looks_like_a_leftover_stays(place: Path) -> None:
    names = (
        "new.tmp-20240101",
        "new.old",
        "new.tk-target-notes",
        "new.tk-target-0123abcd.txt",
        "anew.tk-target-0123abcd",
    )
    for name in names:
        shutil.copytree(place / "theirs", place / name)
    before = tree(place)
    reshard(place, place / "new")
    reshard(place, place / "new")
    shutil.rmtree(place / "new")
    assert tree(place) == before


def test_two_jobs_at_once_to_one_target(place: Path) -> None:
    """The second is refused before it writes; the first is not disturbed."""
    first = prepare_reshard(Checkpoint.open(place / "run"), place / "new", Options(Layout()))
    writing, go_on = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        writing.set()
        go_on.wait(30)

    job = threading.Thread(target=first.run, args=[hold])
    job.start()
    try:
        assert writing.wait(30)
        for force in (False, True):
            with pytest.raises(ConfigError, match="Another job is writing"):
                reshard(place, place / "new", force)
    finally:
        go_on.set()
        job.join()
    assert Checkpoint.open(place / "new").verify().ok
    assert sorted(os.listdir(place)) == ["hf", "new", "run", "theirs", "tk"]


@pytest.mark.parametrize("target", ["new", "tk", "empty"])
def test_files_that_arrive_during_the_copy_stay(place: Path, target: str) -> None:
    """Also where nothing or a checkpoint was there before; the new folder is kept and named."""
    (place / "empty").mkdir()
    job = prepare_reshard(Checkpoint.open(place / "run"), place / target, Options(Layout(), force=True))

    def user_writes(_: int) -> None:
        (place / target).mkdir(exist_ok=True)
        (place / target / "thesis.txt").write_text("years of work")

    with pytest.raises(CheckpointError, match="The new folder is complete: ") as refusal:
        job.run(user_writes)
    assert (place / target / "thesis.txt").read_text() == "years of work"
    assert (place / target / "COMMIT").exists() == (target == "tk")
    (kept,) = place.glob(f"{target}.new-*")
    assert str(kept) in str(refusal.value)
    assert Checkpoint.open(kept).verify().ok


def test_files_that_arrive_in_the_old_folder_while_it_is_removed_stay(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = folders.exchange

    def user_writes(one: Path, two: Path) -> None:
        exchange(one, two)
        (one / "thesis.txt").write_text("years of work")

    monkeypatch.setattr(folders, "exchange", user_writes)
    reshard(place, place / "tk")
    (kept,) = place.glob("tk.old-*")
    assert os.listdir(kept) == ["thesis.txt"]
    assert Checkpoint.open(place / "tk").verify().ok


def test_where_names_cannot_be_exchanged_the_old_folder_is_renamed_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(one: Path, two: Path) -> None:
        raise StorageError(f"{one} cannot be exchanged with {two}", errno.EINVAL)

    shutil.copytree(place / "theirs", place / "tk.old")
    (place / "tk.old-").mkdir()
    before = {path: data for path, data in tree(place).items() if b"/tk/" not in path}
    monkeypatch.setattr(folders, "exchange", cannot)
    reshard(place, place / "tk")
    assert {path: data for path, data in tree(place).items() if b"/tk/" not in path} == before
    assert Checkpoint.open(place / "tk").verify().ok


@pytest.mark.parametrize("shared", [False, True])
def test_a_signal_right_after_the_folder_was_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    make_dir = folders.make_dir

    def make_and_stop(path: Path) -> None:
        make_dir(path)
        raise SystemExit(1)  # as commands do on SIGTERM

    monkeypatch.setattr(folders, "make_dir", make_and_stop)
    with pytest.raises(SystemExit), whole_folder(tmp_path / "new", list, shared):
        pytest.fail("the block runs")
    assert list(tmp_path.iterdir()) == []
