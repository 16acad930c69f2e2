"""Libraries that are damaged, half written, or that another user may have written, are never loaded."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.core.native import NativeSource, library_folder, load_library
from tk.core.native.cache_folders import make_cache_folder
from tk.core.native.library_folder import LibraryFolder
from tk.core.native.trust import Untrusted
from tk.tests.core.native.sources import MACHINE, CountingCompiler, plant, plant_bytes, small_source
from tk.tests.open_files import open_files_under

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
STRANGER = 12345


@pytest.fixture
def source(tmp_path: Path) -> NativeSource:
    return small_source(tmp_path)


@pytest.fixture
def stem(source: NativeSource) -> str:
    return source.stem(MACHINE)


@pytest.fixture
def planted(tmp_path: Path, cache: Path, stem: str) -> LibraryFolder:
    """The cache with another library under the name of ours: if it is ever loaded, `answer()` returns 666."""
    folder = make_cache_folder(cache)
    plant(folder, stem, tmp_path / "workshop")
    return folder


def answer(source: NativeSource) -> int:
    library = load_library(source)
    assert library is not None
    return int(library.library.answer())


def test_the_planted_library_is_loaded_where_nothing_is_wrong(source: NativeSource, planted: LibraryFolder) -> None:
    assert answer(source) == 666


def test_only_the_first_load_of_a_file_keeps_it_open(tmp_path: Path, cache: Path) -> None:
    sources = [small_source(tmp_path / name, name, number) for name, number in (("one", 1), ("two", 2))]
    for _ in range(20):
        assert list(map(answer, sources)) == [1, 2]
    assert open_files_under(cache) == 2


def test_a_file_that_cannot_be_read_does_not_stay_open(
    stem: str, planted: LibraryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def fail(fd: int) -> bytes:
        opened.append(fd)
        if len(opened) == 2:  # the library, after its record
            raise OSError(errno.EIO, "Input/output error")
        return read(fd)

    read = library_folder._read
    monkeypatch.setattr(library_folder, "_read", fail)
    with pytest.raises(OSError, match="Input/output error"):
        planted.record(stem)
    assert len(opened) == 2
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[1])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def let_group_write(path: Path) -> None:
    path.chmod(0o664)


def let_all_write(path: Path) -> None:
    path.chmod(0o646)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.every(3)
@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize(
    "fault",
    [
        truncate,
        empty,
        flip,
        link,
        let_group_write,
        let_all_write,
        make_pipe,
        os.unlink,
        pytest.param(give_away, marks=ROOT_ONLY),
    ],
)
def test_a_bad_file_is_built_again(
    fault: Callable[[Path], None],
    suffix: str,
    source: NativeSource,
    stem: str,
    planted: LibraryFolder,
    compiler: CountingCompiler,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault(planted.path / f"{stem}{suffix}")
    if (fault, suffix) == (flip, ".json"):  # a bit of a name: no harm
        (planted.path / f"{stem}.json").write_text("{}")
    assert answer(source) == 42
    assert compiler.compiled() == ["scalar.o", "twice.o"]
    if fault is not os.unlink:  # without both files there is no library to speak of
        assert f"{stem} is built again" in caplog.text
    assert answer(source) == 42
    assert compiler.runs() == []


def test_a_library_that_the_system_refuses_is_built_again(
    source: NativeSource, stem: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant_bytes(make_cache_folder(cache), stem, b"built for another machine")
    assert answer(source) == 42
    assert "The system cannot load" in caplog.text


def in_temporary_folder(source: NativeSource, tmp_path: Path) -> bool:
    library = load_library(source)
    assert library is not None
    assert library.library.answer() == 42
    folder = library.path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    return folder == tmp_path / "tmp" / f"tk-native-{os.geteuid()}"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused(
    mode: int, source: NativeSource, planted: LibraryFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted.path.chmod(mode)
    assert in_temporary_folder(source, tmp_path)
    assert f"{planted.path} may be written by other users" in caplog.text


def test_a_folder_that_is_a_link_is_refused(source: NativeSource, planted: LibraryFolder, tmp_path: Path) -> None:
    planted.path.rename(tmp_path / "elsewhere")
    planted.path.symlink_to(tmp_path / "elsewhere")
    assert in_temporary_folder(source, tmp_path)


@ROOT_ONLY
def test_a_folder_of_another_user_is_refused(source: NativeSource, planted: LibraryFolder, tmp_path: Path) -> None:
    os.chown(planted.path, STRANGER, STRANGER)
    assert in_temporary_folder(source, tmp_path)


@ROOT_ONLY
def test_no_folder_is_made_in_that_of_another_user(source: NativeSource, cache: Path, tmp_path: Path) -> None:
    home = cache.parents[1]  # of a user for whom root works
    home.mkdir()
    os.chown(home, STRANGER, STRANGER)
    assert in_temporary_folder(source, tmp_path)
    assert list(home.iterdir()) == []


def test_owners_decide_even_without_root(planted: LibraryFolder, stem: str) -> None:
    assert planted.record(stem) is not None
    with pytest.raises(Untrusted, match="belongs to the user"):
        LibraryFolder(planted.path, frozenset({STRANGER})).load(stem)


def test_a_name_that_cannot_be_replaced_sends_the_library_elsewhere(
    source: NativeSource, stem: str, planted: LibraryFolder, tmp_path: Path
) -> None:
    path = planted.path / f"{stem}.so"
    path.unlink()
    path.mkdir()
    assert in_temporary_folder(source, tmp_path)


def test_a_place_that_is_no_folder_sends_the_library_elsewhere(
    source: NativeSource, cache: Path, tmp_path: Path
) -> None:
    cache.parent.parent.write_text("a file")
    assert in_temporary_folder(source, tmp_path)


def test_without_any_folder_there_is_no_library(
    source: NativeSource, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.write_text("a file")
    shutil.rmtree(tmp_path / "tmp")
    (tmp_path / "tmp").write_text("a file")
    assert load_library(source) is None
    assert "No folder can keep the native small" in caplog.text


def test_libraries_that_were_not_used_for_long_are_removed(cache: Path) -> None:
    folder = make_cache_folder(cache)
    plant_bytes(folder, "other-0", b"another source's")
    os.utime(cache / "other-0.so", (0, 0))
    for number in range(20):
        plant_bytes(folder, f"small-{number}", b"x")
        os.utime(cache / f"small-{number}.so", (number + 1, number + 1))
    left = {path.name for path in cache.iterdir()}
    expected = {
        f"{stem}{suffix}" for stem in ["other-0", *(f"small-{n}" for n in range(12, 20))] for suffix in (".so", ".json")
    }
    assert left == expected


def test_a_file_system_without_locks_is_no_hindrance(
    source: NativeSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert answer(source) == 42
    assert "has no locks" in caplog.text


def test_a_lock_that_is_never_released_is_waited_for_a_while(
    source: NativeSource, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_cache_folder(cache)
    monkeypatch.setattr(library_folder, "_MAX_WAIT", 0.1)
    with folder.locked():
        assert answer(source) == 42
    assert f"{cache} stays locked by another process" in caplog.text
