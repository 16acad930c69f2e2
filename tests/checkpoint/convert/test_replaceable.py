"""Folders that `--force` replaces: a checkpoint is read once, and again if one of its files is no longer the same."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, Options, prepare_reshard
from tk.checkpoint.convert import replaceable
from tk.checkpoint.read.checkpoint_folder import CheckpointFolder
from tk.checkpoint.read.locate import open_folder
from tk.core.errors import CheckpointError, ConfigError
from tk.core.layout import Layout


def test_an_unchanged_checkpoint_is_read_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(folder: Path) -> CheckpointFolder | None:
        read.append(folder)
        return open_folder(folder)

    monkeypatch.setattr(replaceable, "open_folder", counted)
    found = replaceable.require_replaceable(place / "tk")
    assert replaceable.require_replaceable(place / "tk") == found
    assert read == [place / "tk"]
    manifest = place / "tk" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b" ")  # of the same size
    with pytest.raises(ConfigError, match="does not open as a checkpoint"):
        replaceable.require_replaceable(place / "tk")
    assert len(read) == 2


@pytest.mark.parametrize("name", ["model-00000.safetensors", "COMMIT"])
def test_a_file_that_changes_during_the_copy_stays(place: Path, name: str) -> None:
    job = prepare_reshard(Checkpoint.open(place / "run"), place / "tk", Options(Layout(), force=True))

    def user_writes(_: int) -> None:
        (place / "tk" / name).write_text("years of work")

    with pytest.raises(CheckpointError, match="The new folder is complete: "):
        job.run(user_writes)
    assert (place / "tk" / name).read_text() == "years of work"
