"""Fixtures: a cache of the test's own, and a compiler whose runs are counted."""

from pathlib import Path

import pytest

from tk.tests.core.native.sources import CountingCompiler


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TK_KERNELS", raising=False)
    return tmp_path / "cache" / "tk" / "native"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    return CountingCompiler(tmp_path, monkeypatch)
