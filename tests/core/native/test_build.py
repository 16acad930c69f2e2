"""A build: units that a compiler refuses are left out, another compiler is tried, and undeclared headers are errors."""

from dataclasses import replace
from pathlib import Path

import pytest

from tk.core.native import NativeSource, NativeUnit, build, load_library
from tk.tests.core.native.sources import CountingCompiler, small_source

REFUSE_TWICE = 'case "$*" in *FACTOR*) echo "error: {message}" >&2; exit 1;; esac'


def test_a_unit_that_the_compiler_refuses_is_left_out(
    tmp_path: Path, compiler: CountingCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    source = small_source(tmp_path)
    source = replace(source, units=(*source.units, NativeUnit("odd", tmp_path / "answer.c", ("-mno-such-set",))))
    library = load_library(source)
    assert library is not None
    assert library.units == ("scalar", "twice")
    assert [name for name, _ in library.omitted] == ["odd"]
    assert "-mno-such-set" in library.omitted[0][1]
    assert "cannot compile odd of small, which is left out" in caplog.text
    compiler.runs()
    assert load_library(source) is not None
    assert compiler.compiled() == []  # until there is another compiler, this one is not asked again


def test_without_its_base_there_is_no_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = small_source(tmp_path)
    (tmp_path / "answer.c").write_text("not C\n")
    assert load_library(source) is None
    assert "could not compile scalar of small" in caplog.text
    assert "torch's kernels are used" in caplog.text


def test_units_of_other_machines_are_not_compiled(tmp_path: Path) -> None:
    source = small_source(tmp_path)
    elsewhere = NativeUnit("elsewhere", tmp_path / "answer.c", machines=("pdp11",))
    library = load_library(replace(source, units=(elsewhere, *source.units)))
    assert library is not None
    assert library.units == ("scalar", "twice")
    assert load_library(NativeSource("none", (elsewhere,))) is None


def test_a_header_that_is_no_part_of_the_key_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    source = small_source(folder)
    assert load_library(source) is not None
    assert load_library(replace(source, headers=())) is None
    assert f"scalar of small includes {folder}/number.h, which is not among its headers" in caplog.text


def test_another_compiler_is_tried_where_the_first_cannot_compile_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = 'case "$*" in *answer.c*) echo "fatal error: stdio.h: No such file" >&2; exit 1;; esac'
    broken = CountingCompiler(tmp_path, monkeypatch, before)
    library = load_library(small_source(tmp_path))
    assert library is not None
    assert str(broken.path) not in library.compiler
    assert "stdio.h: No such file" in caplog.text


def test_a_full_disk_does_not_leave_a_unit_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = CountingCompiler(tmp_path, monkeypatch, REFUSE_TWICE.format(message="No space left on device"))
    library = load_library(small_source(tmp_path))
    assert library is not None
    assert library.units == ("scalar", "twice")
    assert str(full.path) not in library.compiler


def test_another_compiler_than_the_one_that_refused_a_unit_builds_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_source(tmp_path)
    CountingCompiler(tmp_path, monkeypatch, REFUSE_TWICE.format(message="unknown flag"), "old")
    first = load_library(source)
    assert first is not None
    assert (first.units, first.omitted) == (("scalar",), (("twice", "error: unknown flag"),))
    newer = CountingCompiler(tmp_path, monkeypatch, name="new")
    second = load_library(source)
    assert second is not None
    assert (second.units, second.omitted, second.library.twice(3)) == (("scalar", "twice"), (), 6)
    newer.runs()
    assert load_library(source) is not None
    assert newer.runs() == []


def test_a_function_that_no_unit_defines_is_an_error_of_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = small_source(tmp_path)
    (tmp_path / "answer.c").write_text("int absent(void);\nint answer(void) { return absent(); }\n")
    assert load_library(source) is None
    assert "could not link small" in caplog.text


def test_flags_of_the_link_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingCompiler(tmp_path, monkeypatch)
    assert load_library(replace(small_source(tmp_path), link_flags=("-Wl,-soname,own-name",))) is not None
    assert "-Wl,-soname,own-name" in counting.runs()[-1]


def test_a_compiler_that_takes_long_is_reported_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler waits until the test has seen the second report of the unit that it compiles."""
    seen = tmp_path / "seen"
    CountingCompiler(tmp_path, monkeypatch, f'case "$*" in *FACTOR*) until [ -e {seen} ]; do sleep 0.01; done;; esac')
    monkeypatch.setattr(build, "_SILENCE", 0.02)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if sum("still twice after" in each for each in said) == 2:
            seen.touch()

    assert load_library(small_source(tmp_path), say) is not None
    assert seen.exists()
    assert "compiled for this machine, once" in caplog.text, "programs that import tk show warnings only"
    caplog.clear()
    assert load_library(small_source(tmp_path), say) is not None
    assert not caplog.text
