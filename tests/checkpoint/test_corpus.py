"""The corpus of broken checkpoints and a sample of damage: each is found, costs little memory and writes nowhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tk.checkpoint import reshard
from tk.core.errors import CheckpointError
from tk.core.layout import Layout
from tk.scripts.broken_checkpoints import CASES, damages, explain, is_found_by_verify, make_good


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_good(tmp_path_factory.mktemp("good") / "run")


@pytest.mark.parametrize("case", CASES)
def test_every_broken_checkpoint_gets_its_error_and_writes_nothing(good: Path, tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    step = Path(shutil.copytree(good, tmp_path / "run" / good.name))
    change(step)
    assert re.match(message, explain(step)), explain(step)
    assert is_found_by_verify(step)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(CheckpointError):
        reshard(step, tmp_path / "new", layout=Layout())
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_good_one_is_good(good: Path) -> None:
    assert explain(good) == ""
    assert not is_found_by_verify(good)


def test_every_flip_and_cut_is_found_by_loading_and_by_verify(good: Path, tmp_path: Path) -> None:
    """`python scripts/broken_checkpoints.py --flips N` tries more."""
    step = Path(shutil.copytree(good, tmp_path / "run" / good.name))
    missed = [damage for damage in damages(step, 2000) if not explain(step) or not is_found_by_verify(step)]
    assert missed == []
    assert explain(step) == ""


def test_no_broken_checkpoint_costs_more_memory_than_its_bytes(tmp_path: Path) -> None:
    """Peak of what loading allocates, beside that of the good one; text is held as bytes and as str while parsed."""
    code = (
        "import shutil, sys, tracemalloc; from pathlib import Path; from tk.scripts.broken_checkpoints import *\n"
        "def peak(step):\n"
        "    tracemalloc.reset_peak(); before = tracemalloc.get_traced_memory()[0]; explain(step)\n"
        "    return tracemalloc.get_traced_memory()[1] - before\n"
        "root = Path(sys.argv[1]); good = make_good(root / 'good'); explain(good); tracemalloc.start()\n"
        "usual = peak(good)\n"
        "for name, (change, _) in CASES.items():\n"
        "    step = Path(shutil.copytree(good, root / name / good.name)); change(step)\n"
        "    size = sum(path.lstat().st_size for path in step.rglob('*') if path.is_file())\n"
        "    print(name, max(peak(step) - usual, 0), size)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.fspath(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == len(CASES)
    assert [line for line in lines if int(line[1]) > 3 * int(line[2])] == []
