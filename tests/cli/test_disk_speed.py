"""The speed of a disk: it is that of reads and writes that really happened, of the size that offload has."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tk.checkpoint.files import storage
from tk.cli import disk_speed
from tk.cli.disk_speed import PIECE, measure_disk
from tk.cli.doctor import doctor
from tk.core.errors import StorageError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Offset and size of each read and write."""
    found: dict[str, list[tuple[int, int]]] = {"pread": [], "pwrite": []}
    for name, seen in found.items():
        real = getattr(storage, name)

        def call(fd: int, buffer: memoryview, offset: int, *rest: Any, real: Any = real, seen: Any = seen) -> Any:
            seen.append((offset, len(buffer)))
            return real(fd, buffer, offset, *rest)

        monkeypatch.setattr(storage, name, call)
    monkeypatch.setattr(disk_speed, "MOST_BYTES", 4 * PIECE)
    return found


def test_only_what_was_written_is_read(tmp_path: Path, calls: dict[str, list[tuple[int, int]]]) -> None:
    """Else the file system answers without the disk."""
    speed = measure_disk(tmp_path, 0.0)
    assert speed.read > 0
    assert speed.written > 0
    assert sorted(calls["pwrite"]) == [(offset, 2**22) for offset in range(0, PIECE, 2**22)], "one piece in no time"
    assert sorted(calls["pread"])[-4:] == sorted(calls["pwrite"]), "after one page that tries direct reads"
    assert list(tmp_path.iterdir()) == []


def test_a_longer_measurement_goes_round(tmp_path: Path, calls: dict[str, list[tuple[int, int]]]) -> None:
    measure_disk(tmp_path, 0.05)
    assert max(offset for offset, _ in calls["pwrite"]) < 4 * PIECE


def test_a_disk_without_room_or_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> int:
        raise StorageError("The disk fails.", errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "pwrite", fails)
        with pytest.raises(StorageError, match="The disk fails"):
            measure_disk(tmp_path, 0.01)
    monkeypatch.setattr(disk_speed, "free_bytes", lambda folder: PIECE)
    with pytest.raises(StorageError, match="no room for a measurement"):
        measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_option_of_tk_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_disk, "__defaults__", (0.0,))
    shown = CliRunner().invoke(doctor, ["--disk", str(tmp_path), "--json"])
    document = json.loads(shown.stdout)
    assert document["folder"] == str(tmp_path)
    assert min(document["read"], document["written"]) > 0
    lines = CliRunner().invoke(doctor, ["--disk", str(tmp_path)]).stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}: reads ")
    assert lines[1].startswith("tk plan CONFIG.toml --disk-rate ")
    assert CliRunner().invoke(doctor, ["--disk", os.fspath(tmp_path / "absent")]).exit_code == 2
