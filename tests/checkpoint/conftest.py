"""Fixtures of the checkpoint room."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, prepare_export
from tk.core.layout import Layout
from tk.core.tensors import TensorSpec
from tk.tests.checkpoint.saving import LLAMA, LLAMA_CONFIG, STATES, llama_table, save_step


@pytest.fixture
def table() -> tuple[TensorSpec, ...]:
    """A small Llama with tied embeddings."""
    return llama_table()


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of four ranks: two layers, fp32 weights and Adam's moments. It is read and never changed."""
    run = tmp_path_factory.mktemp("good") / "run"
    return save_step(run, llama_table(layers=2), Layout(tp=2, dp=2, zero=1), STATES, side_files={"config.json": b"{}"})


@pytest.fixture
def step(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "run" / good.name))


@pytest.fixture
def llama_step(tmp_path: Path) -> Path:
    """A step of four ranks with optimizer state and the config.json of its model."""
    files = {"config.json": json.dumps(LLAMA_CONFIG).encode()}
    return save_step(tmp_path / "run", LLAMA, Layout(tp=2, dp=2, zero=1), side_files=files)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, `run`, and two checkpoints to be replaced: `tk` and `hf`."""
    folder = tmp_path_factory.mktemp("made")
    step = Checkpoint.open(
        save_step(folder / "run", llama_table(layers=1, tied=False), Layout(tp=2), side_files={"config.json": b"{}"})
    )
    prepare_export(step, folder / "tk").run()
    prepare_export(step, folder / "hf", plain=True).run()
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of it, and a thing of the user's that links lead to."""
    shutil.copytree(made, tmp_path / "place")
    (tmp_path / "place" / "theirs").mkdir()
    (tmp_path / "place" / "theirs" / "thesis.txt").write_text("years of work")
    return tmp_path / "place"


@pytest.fixture(scope="session")
def private_mounts() -> None:
    """The right to mount folders that only a child sees; elsewhere the tests are left out, with a reason."""
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"this user may not mount: {tried.stderr.decode().strip()}")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, to be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"this user may not mount: {tried.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)
