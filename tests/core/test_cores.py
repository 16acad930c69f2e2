"""Cores by affinity and by the time of control groups of both versions, nested, unlimited, and absent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tk.core.cores import usable_cores

V2 = "0::/a/b\n"
V1 = "12:cpuset:/a/b\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n0::/\n"


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("", {}, 8),
        (V2, {}, 8),
        (V2, {"a/b/cpu.max": "max 100000\n"}, 8),
        (V2, {"a/b/cpu.max": "200000 100000\n"}, 2),
        (V2, {"a/b/cpu.max": "250000 100000\n"}, 2),
        (V2, {"a/b/cpu.max": "50000 100000\n"}, 1),
        (V2, {"a/b/cpu.max": "1600000 100000\n"}, 8),
        (V2, {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        (V2, {"a/b/cpu.max": "max 100000\n", "cpu.max": "600000 100000\n"}, 6),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),  # a container with a namespace of its own
        ("0::/../other\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/docker/x\n", {"cpu.max": "200000 100000\n"}, 2),  # one without
        (V2, {"a/b/cpu.max": "none of both\n"}, 8),
        (V2, {"a/b/cpu.max": "100000 0\n"}, 8),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "300000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 8),
        (V1, {"cpu/cpu.cfs_quota_us": "500000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 5),
    ],
)
def test_groups_limit_the_cores(tmp_path: Path, own: str, files: dict[str, str], cores: int) -> None:
    groups = tmp_path / "cgroup"
    write(groups, files)
    if own != V1:
        write(groups, {"cgroup.controllers": "cpu memory\n"})
    (tmp_path / "own").write_text(own)
    assert usable_cores(groups, tmp_path / "own") == cores


def test_a_system_without_control_groups_has_its_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path / "no file") == 8


def test_the_affinity_of_a_real_process_counts() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from tk.core.cores import usable_cores; print(usable_cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
