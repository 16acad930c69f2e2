"""Several processes at once, a killed one, and one of another user."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tk.core.native import NativeSource, load_library
from tk.tests.core.native.sources import CountingCompiler, small_source

NOBODY = 65534
LOADER = f"""
import logging, os, sys
from pathlib import Path
from tk.core.native import load_library
from tk.tests.core.native.test_processes import one_unit
logging.basicConfig(level=logging.INFO, format="%(message)s")
source = one_unit(Path(sys.argv[1]))
if sys.argv[2:] == ["as nobody"]:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid({NOBODY})
        os.setuid({NOBODY})
    print(os.access(os.environ["XDG_CACHE_HOME"], os.W_OK), os.geteuid(), flush=True)
library = load_library(source)
print(library and (library.library.answer(), str(library.path.parent)))
"""
# Each compilation waits until the test has opened the other end of a named pipe and closed it.
WAIT = 'case "$*" in *" -c "*) read line < {gate};; esac'


def one_unit(folder: Path) -> NativeSource:
    source = small_source(folder)
    return replace(source, units=source.units[:1])


def start(*arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", LOADER, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    """A compiler that waits at a gate."""
    os.mkfifo(tmp_path / "gate")
    return CountingCompiler(tmp_path, monkeypatch, WAIT.format(gate=tmp_path / "gate"))


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_two_processes_compile_once(tmp_path: Path, compiler: CountingCompiler, cache: Path) -> None:
    first = start(str(tmp_path))
    gate = os.open(tmp_path / "gate", os.O_WRONLY)  # returns when it compiles
    second = start(str(tmp_path))
    assert second.stderr
    assert second.stderr.readline().startswith("Waiting for another process")
    os.close(gate)
    for process in (first, second):
        output, errors = process.communicate(timeout=60)
        assert output == f"(42, '{cache}')\n", errors
    assert compiler.compiled() == ["scalar.o"]


def test_a_builder_that_is_killed_blocks_no_other(
    tmp_path: Path, compiler: CountingCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(str(tmp_path))
    gate = os.open(tmp_path / "gate", os.O_WRONLY)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert [path.name[:10] for path in cache.iterdir() if path.is_dir()] == [".building-"]
    monkeypatch.delenv("CC")
    library = load_library(one_unit(tmp_path))  # while the killed process's compiler still runs
    assert library is not None
    assert library.library.answer() == 42
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    os.close(gate)
    assert compiler.compiled() == ["scalar.o"]


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_folder(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cache", "tmp", "sources"):
        (public_folder / name).mkdir()
    (public_folder / "cache").chmod(0o555)
    (public_folder / "tmp").chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(public_folder / "cache"))
    monkeypatch.setenv("TMPDIR", str(public_folder / "tmp"))
    output, errors = start(str(public_folder / "sources"), "as nobody").communicate(timeout=60)
    user = os.geteuid() or NOBODY
    folder = public_folder / "tmp" / f"tk-native-{user}"
    assert output == f"False {user}\n(42, '{folder}')\n", errors
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, user)
    assert f"{public_folder}/cache/tk/native cannot keep the native small" in errors
