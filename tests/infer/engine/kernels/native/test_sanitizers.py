"""The kernels touch no memory that is not theirs, and do nothing that C leaves undefined."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tk.core.native import NativeUnit
from tk.infer.engine.kernels.native.binding.library import SOURCE
from tk.tests.model.architectures import ENTRIES


def _runtime(name: str) -> str:
    """Returns the path of a sanitizer's runtime library; its bare name if the compiler has none."""
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc's sanitizers are preloaded")
@pytest.mark.timeout(1200)
def test_every_architecture_runs_clean(tmp_path: Path) -> None:
    runtime = _runtime("libasan.so")
    assert Path(runtime).is_absolute(), "gcc has no libasan"
    names = ("llama3", "qwen2 sliding", "qwen2_moe", "glm4_moe", "gpt2", "gpt2 untied")
    for name in names:
        ENTRIES[name].make(tmp_path / name)
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are not ours
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CC": "gcc",
    }
    module = "tk.tests.infer.engine.kernels.native.sanitized"
    command = [sys.executable, "-m", module, *(str(tmp_path / name) for name in names)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("\n") >= 5 * len(names), run.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("unit", [each for each in SOURCE.units if not each.machines], ids=lambda unit: unit.name)
def test_no_compiler_warns(unit: NativeUnit) -> None:
    flags = ("-std=c11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", *unit.flags)
    run = subprocess.run(["gcc", *flags, str(unit.source)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
