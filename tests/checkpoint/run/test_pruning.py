"""The removal of steps where a folder cannot be renamed, by a real overlay, and the leftovers of an interrupted one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tk.checkpoint import RunFolder
from tk.checkpoint.run.pruning import is_half_removed
from tk.tests.checkpoint.crashing import assert_is_step, lower_layer, save

MOUNT = "mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged"
PRUNE = """
from pathlib import Path
from tk.checkpoint import RunFolder
from tk.tests.checkpoint.crashing import assert_is_step, save

run = Path("merged/run")
save(run, range(4, 6), keep=1)
assert sorted(path.name for path in run.iterdir()) == ["LATEST", "LOCK", "step-00000005"], list(run.iterdir())
assert_is_step(run / "step-00000005", 5)
"""


@pytest.mark.usefixtures("private_mounts")
def test_steps_of_a_lower_layer_are_pruned_in_place(tmp_path: Path) -> None:
    """A container that goes on with a run of its image."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    save(tmp_path / "lower" / "run", range(1, 4), keep=0)
    script = f'{MOUNT} && exec "$0" -P -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, PRUNE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_is_step(tmp_path / "lower" / "run" / "step-00000003", 3)


def test_the_next_start_ends_an_interrupted_removal_and_leaves_what_is_no_step_alone(tmp_path: Path) -> None:
    save(tmp_path, range(1, 4), keep=0)
    begun, empty, theirs = (tmp_path / f"step-0000000{step}" for step in (1, 2, 5))
    (begun / "COMMIT").rename(begun / "COMMIT.trash-0000dead")
    for path in (empty, theirs):
        path.mkdir(exist_ok=True)
    for path in sorted(empty.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (theirs / "COMMIT.trash-notes").write_text("years of work")
    assert [is_half_removed(path) for path in (begun, empty, theirs, tmp_path / "step-00000003")] == [
        True,
        True,
        False,
        False,
    ]
    with lower_layer(), RunFolder(tmp_path).lock():
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000005"]
    assert (theirs / "COMMIT.trash-notes").exists()
    assert_is_step(tmp_path / "step-00000003", 3)
