"""A committed step on disk: missing and foreign files are named."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError, NotCommitted, ShardMissing
from tk.scripts.broken_checkpoints import flip


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", "parts/00001.json", "model-00000.safetensors"])
def test_a_missing_file(step: Path, name: str) -> None:
    (step / name).unlink()
    with pytest.raises((ShardMissing, NotCommitted), match=name.split("/")[-1]):
        Checkpoint.open_step(step)


def test_a_link_in_place_of_a_shard(step: Path) -> None:
    path = step / "model-00000.safetensors"
    path.rename(step / "elsewhere")
    path.symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match=r"model-00000.safetensors is a link to .*elsewhere, outside the hub"):
        Checkpoint.open_step(step)


def test_a_manifest_that_commit_does_not_know(step: Path) -> None:
    flip(step / "manifest.json", 30)
    with pytest.raises(NotCommitted, match="does not match COMMIT"):
        Checkpoint.open_step(step)
