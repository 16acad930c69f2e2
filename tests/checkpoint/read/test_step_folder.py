"""A committed step on disk: missing and foreign files are named."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError, DamagedCheckpoint, NotCommitted, ShardCorrupt, ShardMissing
from tk.scripts.broken_checkpoints import flip


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", "parts/00001.json", "model-00000.safetensors"])
def test_a_missing_file(step: Path, name: str) -> None:
    (step / name).unlink()
    with pytest.raises((ShardMissing, NotCommitted), match=name.split("/")[-1]):
        Checkpoint.open_step(step)


def test_a_link_in_place_of_a_shard(step: Path) -> None:
    """It is followed: checksums show whether it leads to the shard. One that leads nowhere is no damage."""
    path, other = step / "model-00000.safetensors", step / "model-00001.safetensors"
    path.rename(step.parent / "elsewhere")
    path.symlink_to("../elsewhere")
    assert Checkpoint.open_step(step).verify().ok
    path.unlink()
    path.symlink_to(other.name)
    with pytest.raises(ShardCorrupt, match=r"model-00000.safetensors has \d+ bytes"):
        Checkpoint.open_step(step)
    path.unlink()
    path.symlink_to("../nowhere")
    with pytest.raises(CheckpointError, match=r"is a link to \.\./nowhere, which does not exist") as error:
        Checkpoint.open_step(step)
    assert not isinstance(error.value, DamagedCheckpoint)


def test_a_manifest_that_commit_does_not_know(step: Path) -> None:
    flip(step / "manifest.json", 30)
    with pytest.raises(NotCommitted, match="does not match COMMIT"):
        Checkpoint.open_step(step)
