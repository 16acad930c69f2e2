"""Which checkpoint a path means."""

import os
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "no", "does not exist"),
        (tmp_path, "holds no checkpoint"),
        (Path(__file__), "is a file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)
