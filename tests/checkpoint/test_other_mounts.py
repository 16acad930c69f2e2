"""Folders that are mounted elsewhere or over, between two commands of ours: bind mounts and overlays, as of containers.

Each case mounts in a namespace of its own, writes as another program would, and runs our commands there.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tk.checkpoint import Checkpoint, prepare_export
from tk.core.layout import Layout
from tk.tests.checkpoint.other_writers import edit_config, saved_over
from tk.tests.checkpoint.saving import LLAMA, LLAMA_CONFIG, save_step

OVERLAY: Final = (
    "mount -t tmpfs none work && mkdir work/up work/inner && "
    "mount -t overlay overlay -o lowerdir=tk,upperdir=work/up,workdir=work/inner seen"
)
SAME: Final = "the same: 21 slots of tensors are bit-equal"

# How `seen` is mounted, what is written there, and what `tk diff seen tk` says.
CASES: Final = {
    "a bind mount": ("mount --bind tk seen", "", SAME),
    "a read-only bind mount": ("mount --bind tk seen && mount -o remount,ro,bind seen", "", SAME),
    "an overlay": (OVERLAY, "", SAME),
    "an overlay, a file touched": (OVERLAY, "touch seen/model-00000.safetensors", SAME),  # copied up: another inode
    "an overlay, another model saved": (OVERLAY, "cp saved/* seen/", "put model.safetensors there, and changed config"),
    "an overlay, config.json edited": (OVERLAY, "cp edited/config.json seen/", "config.json is not the file that was"),
    "an overlay, weights removed": (OVERLAY, "rm seen/model-00000.safetensors", "model-00000.safetensors is missing"),
    "weights mounted over": (
        "mount --bind tk seen && mount --bind saved/model.safetensors seen/model-00000.safetensors",
        "",
        "model-00000.safetensors has",
    ),
    "config.json mounted over": (
        "mount --bind tk seen && mount --bind edited/config.json seen/config.json",
        "",
        "config.json is not the file that was saved",
    ),
    "an empty disk mounted over": ("mount -t tmpfs none seen", "", "the folder is empty"),
}
FIRST: Final = "an overlay, another model saved"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed export, another model, and the export's config.json after an edit."""
    home = tmp_path_factory.mktemp("home")
    step = save_step(home / "run", LLAMA, Layout(), side_files={"config.json": json.dumps(LLAMA_CONFIG).encode()})
    prepare_export(Checkpoint.open(step), home / "tk").run()
    saved_over(home / "saved")
    edit_config(Path(shutil.copytree(home / "tk", home / "edited")))
    for name in ("seen", "work"):
        (home / name).mkdir()
    return home


@pytest.mark.usefixtures("private_mounts")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FIRST else pytest.mark.matrix) for name in CASES]
)
def test_a_mounted_folder_between_our_commands(home: Path, name: str) -> None:
    mount, write, wanted = CASES[name]
    tk = '"$0" -P -m tk'
    script = f"{mount} && {write or ':'} && {tk} diff seen tk; {tk} export seen new && {tk} diff new tk"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable], cwd=home, capture_output=True, text=True, check=False
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert wanted in said, said
    assert (done.returncode == 0, said.count(SAME)) == ((True, 2) if wanted == SAME else (False, 0)), said
    assert (home / "new").exists() == (wanted == SAME)
    shutil.rmtree(home / "new", ignore_errors=True)
