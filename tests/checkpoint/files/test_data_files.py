"""Many data files, few of them open."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.files import data_files, storage
from tk.checkpoint.files.data_files import DataFiles, NewFiles
from tk.tests.limited import limited


def test_few_files_are_open_at_once(llama_step: Path, tmp_path: Path) -> None:
    """32 files are written where a process may have 24 open."""

    command = limited(
        resource.RLIMIT_NOFILE, 24, "reshard", str(llama_step), str(tmp_path / "new"), "--tp", "4", "--pp", "2"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == 32
    assert Checkpoint.open(tmp_path / "new").verify().ok


def test_the_file_not_asked_for_for_longest_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    closed: list[int] = []

    def open_file(name: str) -> int:
        opened.append(name)
        return os.open(os.devnull, os.O_RDONLY)

    def close_file(fd: int) -> None:
        closed.append(fd)
        os.close(fd)

    monkeypatch.setattr(data_files, "max_open", lambda: 2)
    with DataFiles(open_file, close_file) as files:
        first, second = files.open("a"), files.open("b")
        assert files.open("a") == first
        files.open("c")
        assert closed == [second]
        assert len(files.descriptors) == 2
        files.open("b")
    assert opened == ["a", "b", "c", "b"]
    assert files.descriptors == []


def test_new_files_begin_with_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "max_open", lambda: 1)
    with NewFiles(tmp_path, {"a": b"head a", "b": b"head b"}) as files:
        for at, text in ((6, b" and"), (10, b" more")):
            storage.pwrite(files.open("a"), memoryview(text), at)
            files.open("b")
        files.finish()
    assert (tmp_path / "a").read_bytes() == b"head a and more"
    assert (tmp_path / "b").read_bytes() == b"head b"
