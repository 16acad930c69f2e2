"""A library is built at first use, and loaded from the cache afterwards."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from tk.core.cpu import Cpu
from tk.core.native import load_library
from tk.core.native.image import fill_folder
from tk.tests.core.native.sources import CountingCompiler, quiet, small_source


def test_a_library_is_built_then_taken_from_the_cache(tmp_path: Path, compiler: CountingCompiler, cache: Path) -> None:
    lines: list[str] = []
    source = small_source(tmp_path)
    built = load_library(source, lines.append)
    assert built is not None
    assert (built.library.answer(), built.library.twice(4)) == (42, 8)
    assert (built.units, built.omitted) == (("scalar", "twice"), ())
    assert str(compiler.path) in built.compiler
    assert compiler.compiled() == ["scalar.o", "twice.o"]
    assert sorted(lines) == [
        "compiling native small: scalar (1 of 2) ...",
        "compiling native small: twice (2 of 2) ...",
    ]
    again = load_library(source, lines.append)
    assert again is not None
    assert (again.library.answer(), again.units, again.path) == (42, built.units, built.path)
    assert (compiler.runs(), len(lines)) == ([], 2)
    assert built.path.parent == cache
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".json", ".so"]  # "": the lock


def test_a_library_is_named_by_its_source_flags_and_machine(tmp_path: Path) -> None:
    source = small_source(tmp_path)
    scalar, twice = source.units
    stems = {source.stem("x86_64"), source.stem("aarch64")}
    stems.add(replace(source, units=(scalar, replace(twice, flags=("-DFACTOR=3",)))).stem("x86_64"))
    stems.add(replace(source, link_flags=("-s",)).stem("x86_64"))
    (tmp_path / "number.h").write_text("#define NUMBER 43\n")
    stems.add(source.stem("x86_64"))
    (tmp_path / "answer.c").write_text((tmp_path / "answer.c").read_text() + "\n")
    stems.add(source.stem("x86_64"))
    assert len(stems) == 6


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is one of x86 compilers")
def test_units_that_this_cpu_cannot_run_are_compiled_for_images_alone(
    tmp_path: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_source(tmp_path)
    scalar, twice = source.units
    wide = replace(source, units=(scalar, replace(twice, flags=(*twice.flags, "-msse2"))))
    monkeypatch.setattr("tk.core.native.load.read_cpu", lambda: Cpu("old", frozenset({"sse"})))
    old = load_library(wide)
    assert old is not None
    assert (old.units, old.omitted, compiler.compiled()) == (("scalar",), (), ["scalar.o"])

    monkeypatch.setattr("tk.core.native.load.read_cpu", lambda: Cpu("new", frozenset({"sse", "sse2"})))
    new = load_library(wide)
    assert new is not None
    assert (new.units, new.path.parent) == (("scalar", "twice"), old.path.parent)
    assert new.path != old.path

    ((path, record),) = fill_folder([wide], tmp_path / "image", quiet)
    assert record.units == ("scalar", "twice")
    monkeypatch.setattr("tk.core.native.load.read_cpu", lambda: Cpu("old", frozenset({"sse"})))
    monkeypatch.setenv("TK_KERNELS", str(path.parent))
    of_image = load_library(wide)
    assert of_image is not None
    assert (of_image.path, of_image.units) == (path, ("scalar", "twice"))


def test_the_folder_of_the_sources_does_not(tmp_path: Path) -> None:
    stems = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        stems.add(small_source(tmp_path / name).stem("x86_64"))
    assert len(stems) == 1


def test_a_changed_header_is_built_and_loaded(tmp_path: Path) -> None:
    source = small_source(tmp_path)
    assert load_library(source) is not None
    (tmp_path / "number.h").write_text("#define NUMBER 43\n")
    changed = load_library(source)
    assert changed is not None
    assert changed.library.answer() == 43


def test_the_current_folder_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert load_library(small_source(tmp_path)) is not None
    assert list(Path().iterdir()) == []
