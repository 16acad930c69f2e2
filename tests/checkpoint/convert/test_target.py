"""Targets that no tidy example has: a user's files are never destroyed, and every refusal comes before the copy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, Options, prepare_export, prepare_reshard
from tk.core.errors import ConfigError
from tk.core.layout import Layout
from tk.tests.checkpoint.places import reshard, tree


def _project(place: Path) -> Path:
    (place / "web" / "src").mkdir(parents=True)
    (place / "web" / "manifest.json").write_text("{}")
    (place / "web" / "src" / "app.js").write_text("years of work")
    return place / "web"


def _parts(place: Path) -> Path:
    (place / "cad" / "parts").mkdir(parents=True)
    (place / "cad" / "parts" / "wheel.py").write_text("years of work")
    return place / "cad"


def _clone(place: Path) -> Path:
    (place / "hf" / ".git").mkdir()
    (place / "hf" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    return place / "hf"


def _with(kind: str, name: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / kind / name).write_text("years of work")
        return place / kind

    return make


def _without(name: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / "tk" / name).unlink()
        return place / "tk"

    return make


def _linked_side_file(place: Path) -> Path:
    (place / "hf" / "config.json").unlink()
    (place / "hf" / "config.json").hardlink_to(place / "theirs" / "thesis.txt")
    (place / "hf" / "generation_config.json").symlink_to(place / "theirs" / "thesis.txt")
    return place / "hf"


def _link_to(target: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / "empty").mkdir()
        (place / "link").symlink_to(target)
        return place / "link"

    return make


def _beneath(name: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / "link").symlink_to("nowhere")
        return place / name / "new"

    return make


REFUSED: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "a project with a manifest.json": (_project, r"manifest\.json, src"),
    "a folder parts with sources": (_parts, "parts/wheel.py"),
    "a git clone of a model": (_clone, r"more than a checkpoint.*\.git"),
    "notes beside a Hugging Face model": (_with("hf", "notes.txt"), r"more than a checkpoint.*notes\.txt"),
    "notes beside a tk checkpoint": (_with("tk", "notes.txt"), r"more than a checkpoint.*notes\.txt"),
    "notes among the parts": (_with("tk", "parts/00001.json"), r"parts/00001\.json"),
    "a link for a side file": (_linked_side_file, r"generation_config\.json"),
    "a step that does not count": (_without("COMMIT"), "does not open as a checkpoint.*never finished"),
    "a checkpoint that lacks a file": (_without("model-00000.safetensors"), r"does not open.*model-00000\.safetensors"),
    "a folder of the user's": (lambda place: place / "theirs", r"no checkpoint.*thesis\.txt"),
    "a run folder": (lambda place: place / "run", "contains it"),
    "a file": (lambda place: place / "theirs" / "thesis.txt", "is a file"),
    "a link to a checkpoint": (_link_to("tk"), r"is a link \(to tk\)"),
    "a link to an empty folder": (_link_to("empty"), r"is a link \(to empty\)"),
    "a dangling link": (_link_to("nowhere"), r"is a link \(to nowhere\)"),
    "a link loop": (_link_to("link"), r"is a link \(to link\)"),
    "beneath a file": (_beneath("theirs/thesis.txt"), r"thesis\.txt is a file"),
    "beneath a dangling link": (_beneath("link"), "leads nowhere"),
    "the source": (lambda place: place / "run" / "step-00000001", "is the source"),
    "inside the source": (lambda place: place / "run" / "step-00000001" / "new", "inside the source"),
    "the source, through a link": (lambda place: place / "hf" / ".." / "run", "contains it"),
    "the current folder": (lambda place: ".", "own name"),
    "the current folder by its name": (lambda place: place / "now", "is the current folder"),
    "the folder above": (lambda place: "..", "own name"),
    "the root": (lambda place: "/", "own name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_touched(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = REFUSED[name]
    (place / "now").mkdir()
    monkeypatch.chdir(place / "now")
    target = make(place)
    before = tree(place)
    source = Checkpoint.open(place / "run")
    with pytest.raises(ConfigError, match=message):
        prepare_reshard(source, target, Options(Layout(), force=True))
    assert tree(place) == before


def test_a_folder_that_holds_the_files_behind_the_source_s_links_is_refused(place: Path) -> None:
    """The hub's cache: a snapshot's names are links into blobs/."""
    blobs, snapshot = place / "models--me--mine" / "blobs", place / "models--me--mine" / "snapshots" / "main"
    shutil.copytree(place / "hf", blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = tree(place)
    with pytest.raises(ConfigError, match=r"blobs holds the file behind .*main/config\.json, which the copy reads"):
        prepare_export(Checkpoint.open(snapshot), blobs, plain=True, force=True)
    assert tree(place) == before


def test_replacing_breaks_no_hard_link(place: Path) -> None:
    """A linked export shares its files with its source."""
    shutil.rmtree(place / "hf")
    shutil.copytree(place / "tk", place / "hf", copy_function=os.link)
    before = {path: data for path, data in tree(place).items() if b"/hf" not in path}
    reshard(place, place / "hf")
    assert {path: data for path, data in tree(place).items() if b"/hf" not in path} == before
    assert all(path.stat().st_nlink == 1 for path in (place / "hf").glob("*.safetensors"))


MOUNTS = {
    "a mount point": ("mount -t tmpfs none new", "new", "is a mount point"),
    "a bind mount of the same disk": ("mount --bind empty new", "new", "is a mount point"),
    "a checkpoint with a mounted file": (
        "mount --bind theirs/thesis.txt tk/config.json",
        "tk",
        "holds the mount point",
    ),
    "the source, mounted elsewhere": ("mount --bind run new", "new/step-00000001", "is the source"),
    "a new folder in the source, mounted elsewhere": (
        "mount --bind run/step-00000001 new",
        "new/made",
        "lies inside the source",
    ),
    "the source beneath two mounts": (
        "mount --bind . new && mount --bind new/run empty",
        "empty/step-00000001",
        "is the source",
    ),
    "a read-only disk": ("mount -t tmpfs -o ro none new", "new/made", "cannot be written"),
}


@pytest.mark.usefixtures("private_mounts")
@pytest.mark.parametrize("name", MOUNTS)
def test_mount_points_are_refused(place: Path, name: str) -> None:
    mount, target, message = MOUNTS[name]
    for folder in ("new", "empty"):
        (place / folder).mkdir()
    before = tree(place)
    done = reshard_in_mounts(place, mount, target)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert tree(place) == before


@pytest.mark.usefixtures("private_mounts")
def test_a_disk_without_inodes_is_not_said_to_lack_space(place: Path) -> None:
    (place / "new").mkdir()
    done = reshard_in_mounts(place, "mount -t tmpfs -o nr_inodes=1 none new", "new/made")
    assert (done.returncode, "takes no more files" in done.stderr) == (1, True), done.stderr


def reshard_in_mounts(place: Path, mount: str, target: str) -> "subprocess.CompletedProcess[str]":
    """Reshards the run to a target while something is mounted, which only the child sees."""
    script = f'{mount} && exec "$0" -P -m tk reshard run "{target}" --tp 1 --force'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable], cwd=place, capture_output=True, text=True, check=False
    )


@pytest.fixture
def as_nobody(place: Path) -> Callable[[Callable[[], object]], str]:
    """Runs something in a child that has another user's rights; its error."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    for above in [place, *place.parents][
        :5
    ]:  # up to pytest's folder of all its runs, beneath which workers have one each
        above.chmod(above.stat().st_mode | 0o755)

    def run(work: Callable[[], object]) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                work()
                answer = "no error"
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answers:
            answer = answers.read()
        os.waitpid(child, 0)
        return answer

    return run


def test_another_users_folders_are_refused(place: Path, as_nobody: Callable[[Callable[[], object]], str]) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    shutil.move(place / "tk", place / "open" / "tk")
    source = Checkpoint.open(place / "run")
    before = tree(place)
    for target, message in (("new", "place cannot be written"), ("open/tk", "tk cannot be written")):
        job = partial(prepare_reshard, source, place / target, Options(Layout(), force=True))
        assert message in as_nobody(job)
    assert tree(place) == before
    made = as_nobody(lambda: prepare_reshard(source, place / "open" / "new", Options(Layout())).run())
    assert made == "no error"
