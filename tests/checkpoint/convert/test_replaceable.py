"""Folders that `--force` replaces: complete checkpoints, read once, and again if one of the files has changed."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, Options, export_links, prepare_export, prepare_reshard
from tk.checkpoint.convert import replaceable
from tk.checkpoint.format.chunk import Part
from tk.checkpoint.format.manifest import FileDigest, Manifest, PartRecord
from tk.checkpoint.read.checkpoint_folder import CheckpointFolder
from tk.checkpoint.read.locate import open_folder
from tk.core.errors import CheckpointError, ConfigError
from tk.core.layout import Layout
from tk.tests.checkpoint.places import tree

COPIES: dict[str, Callable[[Checkpoint, Path], object]] = {
    "reshard": lambda source, target: prepare_reshard(source, target, Options(Layout(), force=True)),
    "export": lambda source, target: prepare_export(source, target, plain=True, force=True),
    "linked export": lambda source, target: export_links(source, target, force=True),
}


def test_an_unchanged_checkpoint_is_read_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(folder: Path) -> CheckpointFolder | None:
        read.append(folder)
        return open_folder(folder)

    monkeypatch.setattr(replaceable, "open_folder", counted)
    folder = replaceable.ReplaceableFolder(place / "tk")
    found = folder.files()
    assert folder.files() == found
    assert read == [place / "tk"]
    manifest = place / "tk" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b" ")  # of the same size
    with pytest.raises(ConfigError, match="does not open as a checkpoint"):
        folder.files()
    assert len(read) == 2


@pytest.mark.parametrize("copy", COPIES)
def test_a_checkpoint_that_lacks_elements_is_not_replaced(place: Path, copy: str) -> None:
    """All of its digests and sizes are right; a tensor is in no chunk of its parts."""
    target = place / "lacking"
    shutil.copytree(place / "tk", target)
    [file] = (target / "parts").iterdir()
    part = Part.parse(file.read_bytes(), file.name)
    part = replace(part, chunks=part.chunks[:-1])
    manifest = Manifest.parse((target / "manifest.json").read_bytes(), "manifest.json")
    file.write_bytes(part.to_bytes())
    manifest = replace(manifest, parts={file.name: PartRecord.of(part.to_bytes(), part, manifest.tensors)})
    (target / "manifest.json").write_bytes(manifest.to_bytes())
    (target / "COMMIT").write_text(f"{FileDigest.of(manifest.to_bytes()).sha256}\n")
    before = tree(place)
    with pytest.raises(ConfigError, match=r"does not open as a checkpoint, so it is not replaced .* are missing"):
        COPIES[copy](Checkpoint.open(place / "tk"), target)
    assert tree(place) == before


@pytest.mark.parametrize("name", ["model-00000.safetensors", "COMMIT"])
def test_a_file_that_changes_during_the_copy_stays(place: Path, name: str) -> None:
    job = prepare_reshard(Checkpoint.open(place / "run"), place / "tk", Options(Layout(), force=True))

    def user_writes(_: int) -> None:
        (place / "tk" / name).write_text("years of work")

    with pytest.raises(CheckpointError, match="The new folder is complete: "):
        job.run(user_writes)
    assert (place / "tk" / name).read_text() == "years of work"
