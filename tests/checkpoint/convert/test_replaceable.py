"""Folders that `--force` replaces: complete checkpoints, read once, and again if one of the files has changed."""

import os
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
    folder = replaceable.ReplaceableFolder(place / "tk", dict)
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


CARD = {
    "README.md": "# A model card", "LICENSE": "all rights", "modeling_own.py": "x = 1\n", "sub.tiktoken": "IQ== 0\n",
    "additional_chat_templates/tools.jinja": "tools",
}  # fmt: skip


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def plain_copy(source: Path, target: Path) -> None:
    prepare_export(Checkpoint.open(source), target, plain=True, force=True).run()


def test_a_plain_export_with_a_model_card_is_repeated(place: Path) -> None:
    fill(place / "hf", CARD)
    for _ in range(2):
        plain_copy(place / "hf", place / "out")
        assert {name: (place / "out" / name).read_text() for name in CARD} == CARD
    prepare_reshard(Checkpoint.open(place / "hf"), place / "out", Options(Layout(), force=True)).run()
    assert Checkpoint.open(place / "out").folder.kind == "tk"


SPOILED: dict[str, tuple[str, str]] = {  # name, text
    "an edited card": ("README.md", "# My notes on it"),
    "edited code of the same size": ("modeling_own.py", "x = 2\n"),
    "a card of his own": ("README-mine.md", "# A model card"),
    "a file of no kind that is copied": ("thesis.odt", "years of work"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_plain_export_with_a_file_of_the_user_s_is_not_repeated(place: Path, name: str) -> None:
    """`thesis.odt` lies in the source too, and the copy does not write it."""
    file, text = SPOILED[name]
    fill(place / "hf", CARD | {"thesis.odt": "years of work"})
    plain_copy(place / "hf", place / "out")
    (place / "out" / file).write_text(text)
    before = tree(place)
    with pytest.raises(ConfigError, match=f"holds more than a checkpoint, so it is not replaced: {file}"):
        plain_copy(place / "hf", place / "out")
    assert tree(place) == before


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_name_of_a_side_file_may_be_another_thing(place: Path, kind: str) -> None:
    """A link stays although its target's content is equal; a hard link's content stays under its other name."""
    fill(place / "hf", CARD)
    plain_copy(place / "hf", place / "out")
    (place / "theirs" / "card").write_text(CARD["README.md"])
    (place / "out" / "README.md").unlink()
    if kind == "pipe":
        os.mkfifo(place / "out" / "README.md")
    elif kind == "link":
        (place / "out" / "README.md").symlink_to(place / "theirs" / "card")
    else:
        (place / "out" / "README.md").hardlink_to(place / "theirs" / "card")
    before = tree(place)
    if kind == "hard link":
        plain_copy(place / "hf", place / "out")
    else:
        with pytest.raises(ConfigError, match=r"holds more than a checkpoint.*README\.md"):
            plain_copy(place / "hf", place / "out")
        assert tree(place) == before
    assert (place / "theirs" / "card").read_text() == CARD["README.md"]


def test_a_card_that_is_edited_during_the_copy_stays(place: Path) -> None:
    fill(place / "hf", CARD)
    plain_copy(place / "hf", place / "out")
    job = prepare_export(Checkpoint.open(place / "hf"), place / "out", plain=True, force=True)

    def user_writes(_: int) -> None:
        (place / "out" / "README.md").write_text("# A Model card")

    with pytest.raises(CheckpointError, match="The new folder is complete: "):
        job.run(user_writes)
    assert (place / "out" / "README.md").read_text() == "# A Model card"
