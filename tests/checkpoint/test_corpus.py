"""The corpus of broken checkpoints and a sample of damage: each is found, costs little memory and writes nowhere."""

import json
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
from tk.tests.checkpoint.peak_memory import CRAFTED_CASES, LARGE, LARGE_CASES

NOISE = 2**20  # bytes by which the same load may differ from run to run


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


@pytest.mark.parametrize("flips", [400, pytest.param(2000, marks=pytest.mark.matrix)])
def test_every_flip_and_cut_is_found_by_loading_and_by_verify(good: Path, tmp_path: Path, flips: int) -> None:
    """`python scripts/broken_checkpoints.py --flips N` tries more."""
    step = Path(shutil.copytree(good, tmp_path / "run" / good.name))
    missed = [damage for damage in damages(step, flips) if not explain(step) or not is_found_by_verify(step)]
    assert missed == []
    assert explain(step) == ""


def test_no_broken_checkpoint_costs_more_memory_than_its_bytes(tmp_path: Path) -> None:
    """Peak resident memory of loading each, beside that of the good one. Only JSON that is crafted, with checksums that
    fit, becomes objects before it can be judged: at most 16 bytes for each of its own."""
    script = Path(__file__).with_name("peak_memory.py")
    done = subprocess.run(
        [sys.executable, script, os.fspath(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(CASES) + len(LARGE_CASES) + len(CRAFTED_CASES)
    assert [case for case in found if not case[-1]] == [], "nothing was wrong with it"
    assert [
        (name, more, size)
        for name, more, size, _ in found
        if more > NOISE + (16 * LARGE if name in CRAFTED_CASES else size)
    ] == []
