"""Folders that are filled ahead and named by $TK_KERNELS."""

import os
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.core.native import NativeSource, load_library
from tk.core.native.build import BuildFailed
from tk.core.native.image import fill_folder
from tk.tests.core.native.sources import CountingCompiler, quiet, small_source


@pytest.fixture
def source(tmp_path: Path) -> NativeSource:
    return small_source(tmp_path)


@pytest.fixture
def image(tmp_path: Path, source: NativeSource, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the library of `source`, which $TK_KERNELS names."""
    lines: list[str] = []
    mask = os.umask(0o077)
    try:
        ((path, record),) = fill_folder([source], tmp_path / "image" / "kernels", lines.append)
    finally:
        os.umask(mask)
    assert record.units == ("scalar", "twice")
    assert len(lines) == 2
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.parent.stat().st_mode & 0o777 == 0o755
    monkeypatch.setenv("TK_KERNELS", str(path.parent))
    return path.parent


def test_a_library_of_the_image_needs_no_compiler_and_no_cache(
    source: NativeSource, image: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("no_compiler")  # only now: the image is built
    library = load_library(source)
    assert library is not None
    assert (library.library.answer(), library.units) == (42, ("scalar", "twice"))
    assert library.path.parent == image
    assert not cache.exists()


def test_a_folder_filled_again_is_as_it_should_be(source: NativeSource, image: Path) -> None:
    before = sorted(path.name for path in image.iterdir())
    ((path, record),) = fill_folder([source], image, quiet)
    assert record.size == path.stat().st_size
    assert sorted(each.name for each in image.iterdir()) == before


def test_a_link_to_the_folder_may_be_named(
    source: NativeSource, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(image)
    monkeypatch.setenv("TK_KERNELS", str(tmp_path / "link"))
    library = load_library(source)
    assert library is not None
    assert library.path.parent == image


def test_the_library_of_another_source_is_not_used(
    tmp_path: Path, image: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = load_library(small_source(tmp_path, number=43))
    assert library is not None
    assert (library.library.answer(), library.path.parent) == (43, cache)
    assert f"TK_KERNELS={image} is not used for the native small" in caplog.text


def test_an_image_that_others_may_write_is_not_used(
    source: NativeSource, image: Path, cache: Path, compiler: CountingCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    image.chmod(0o777)
    library = load_library(source)
    assert library is not None
    assert library.path.parent == cache
    assert compiler.compiled() == ["scalar.o", "twice.o"]
    assert f"{image} may be written by other users (mode 777): chmod go-w {image}" in caplog.text


def test_a_folder_that_does_not_exist_is_named(
    source: NativeSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TK_KERNELS", "/no/such/folder")
    assert load_library(source) is not None
    assert "TK_KERNELS=/no/such/folder is not used" in caplog.text


def test_a_folder_that_others_may_write_is_not_filled(source: NativeSource, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by other users"):
        list(fill_folder([source], tmp_path / "open", quiet))


def test_a_path_that_is_no_folder_is_not_filled(source: NativeSource, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold native libraries"):
        list(fill_folder([source], tmp_path / "file", quiet))


@pytest.mark.usefixtures("no_compiler")
def test_a_build_ahead_without_a_compiler_fails(source: NativeSource, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="no C compiler"):
        list(fill_folder([source], tmp_path / "image", quiet))
