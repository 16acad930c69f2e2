"""`tk doctor`: a table for people, JSON for scripts, exit code 1 if a required part is broken."""

import json
import os
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tk.cli import native_facts, native_sources
from tk.cli.doctor import doctor
from tk.cli.machine import examine
from tk.core.console_log import show_log
from tk.core.cpu import Cpu
from tk.core.errors import TkError
from tk.core.native import NativeSource, NativeUnit, load_library
from tk.tests.core.native.sources import small_source


def test_it_describes_this_machine() -> None:
    shown = CliRunner().invoke(doctor, ["--json"])
    assert shown.exit_code == 0, shown.output
    facts = {fact["name"]: fact["value"] for fact in json.loads(shown.stdout)["facts"]}
    assert facts["torch"].startswith(str(torch.__version__))
    assert facts["cores"].startswith(str(len(os.sched_getaffinity(0))))
    assert facts["gloo"] == "starts"
    assert {"memory", "/dev/shm", "disk", "network", "open files", "device", "backend", "threads"} <= set(facts)


def test_a_broken_part_is_marked_with_its_remedy_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = examine()
    assert [fact.name for fact in facts if fact.state == "broken"] == ["torch"]
    shown = CliRunner().invoke(doctor, [])
    assert shown.exit_code == 1
    assert "x torch" in shown.stdout
    assert "pip install 'torch>=2.11,<2.14'" in shown.stdout


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeSource:
    """The only native library, built into an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TK_KERNELS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = small_source(tmp_path)
    odd = NativeUnit("odd", found.units[0].source, ("-mno-such-set",))
    found = replace(found, units=(*found.units, odd))
    monkeypatch.setattr(native_sources, "native_sources", lambda: (found,))
    return found


def shown_facts() -> dict[str, dict[str, str]]:
    shown = CliRunner().invoke(doctor, ["--json"])
    return {fact["name"]: fact for fact in json.loads(shown.stdout)["facts"]}


def test_it_shows_native_code_and_the_features_that_the_cpu_lacks_for_it(source: NativeSource, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "tk" / "native"
    before = shown_facts()
    assert before["native small"]["value"] == "not built yet: the first use builds it"
    assert before["native code"]["value"] == f"compiled to {cache}"
    assert before["C compiler"]["state"] == "ok"
    assert not cache.exists()
    library = load_library(source)
    assert library is not None
    after = shown_facts()["native small"]
    assert after["value"] == f"scalar, twice, odd (the compiler refused it); {library.path}"
    library.path.unlink()  # not in place: this process has the library loaded
    library.path.write_bytes(b"x")
    damaged = shown_facts()["native small"]
    assert (damaged["state"], damaged["value"]) == ("note", before["native small"]["value"])
    assert "its bytes have changed" in damaged["hint"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is one of x86 compilers")
def test_it_names_the_features_that_the_cpu_lacks_for_a_unit(
    source: NativeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalar, twice, _ = source.units
    wide = replace(source, units=(scalar, replace(twice, flags=(*twice.flags, "-msse2"))))
    monkeypatch.setattr(native_sources, "native_sources", lambda: (wide,))
    assert load_library(wide) is not None
    assert shown_facts()["native small"]["value"].startswith("scalar, twice; ")
    monkeypatch.setattr(native_facts, "read_cpu", lambda: Cpu("old", frozenset({"sse"})))
    assert shown_facts()["native small"]["value"].startswith("scalar, twice (this CPU lacks sse2); ")


def test_it_names_a_cache_that_cannot_be_used(source: NativeSource, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "tk" / "native"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    fact = shown_facts()["native code"]
    assert (fact["state"], fact["value"]) == ("note", f"compiled to {tmp_path}/tk-native-{os.geteuid()}")
    assert f"chmod go-w {cache}" in fact["hint"]


@pytest.mark.parametrize("as_json", [False, True])
def test_it_builds_native_code_for_an_image(as_json: bool, source: NativeSource, tmp_path: Path) -> None:
    folder = tmp_path / "image"
    show_log()
    shown = CliRunner().invoke(doctor, ["--build", str(folder), *(["--json"] if as_json else [])])
    assert shown.exit_code == 0, shown.output
    (library,) = folder.glob("small-*.so")
    if as_json:
        (built,) = json.loads(shown.stdout)["libraries"]
        assert (built["path"], built["units"], built["omitted"][0][0]) == (str(library), ["scalar", "twice"], "odd")
    else:
        first, second = shown.stdout.splitlines()
        assert first.startswith(f"{library}: scalar, twice, by ")
        assert second == f"export TK_KERNELS={folder}"
    assert "compiling native small: scalar (1 of 3) ..." in shown.stderr


def test_a_build_that_fails_fails_the_command(source: NativeSource, tmp_path: Path) -> None:
    source.units[0].source.write_text("not C")
    shown = CliRunner().invoke(doctor, ["--build", str(tmp_path / "image")])
    assert isinstance(shown.exception, TkError)
    assert "could not compile scalar of small" in str(shown.exception)
