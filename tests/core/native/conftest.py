"""Fixtures: a cache of the test's own, and a compiler whose runs are counted."""

import sys
import tempfile
from pathlib import Path

import pytest

from tk.core.native.load import _say_once
from tk.tests.core.native.sources import CountingCompiler


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries, which does not exist yet."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TK_KERNELS", raising=False)
    _say_once.cache_clear()
    return tmp_path / "cache" / "tk" / "native"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    return CountingCompiler(tmp_path, monkeypatch)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes all compilers from PATH, and hides the package `ziglang`."""
    (tmp_path / "no-programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
