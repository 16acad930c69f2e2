"""Facts about the machine: parts that are missing or too small are named with their remedy."""

import os
import resource
import tomllib
from pathlib import Path

import pytest
import torch

from tk.cli import machine
from tk.cli.machine import OLDEST_TORCH, UNTESTED_TORCH, Fact, examine


def fact(name: str) -> Fact:
    """Returns a fact by its name."""
    return next(fact for fact in examine() if fact.name == name)


def test_memory_and_disk_are_those_of_the_system(tmp_path: Path) -> None:
    facts = {fact.name: fact for fact in examine(tmp_path)}
    assert facts["disk"].value.endswith(f"free in {tmp_path}")
    assert facts["threads"].value.split()[0] in (os.environ.get("OMP_NUM_THREADS"), str(len(os.sched_getaffinity(0))))
    assert facts["memory"].state == facts["cores"].state == "ok"


def test_few_open_files_are_noted_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, -1) if kind == resource.RLIMIT_NOFILE else (-1, -1))
    files = fact("open files")
    assert (files.value, files.state) == ("1024", "note")
    assert "ulimit -n 65536" in files.hint
    assert (fact("processes").value, fact("processes").state) == ("unlimited", "ok")


def test_an_optional_package_that_is_missing_is_noted_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_EXTRAS", (("no_such_package", "[metrics] nothing", "parquet"),))
    missing = fact("no_such_package")
    assert (missing.value, missing.state) == ("not installed", "note")
    assert missing.hint == "needed only for [metrics] nothing: pip install 'pyarrow>=20'"


def test_every_extra_of_the_installation_is_listed() -> None:
    project = tomllib.loads((Path(machine.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    listed = {extra for _, _, extra in machine._EXTRAS} | {
        "compiler",
        "dev",
    }  # one has its own line, one is for tk's authors
    assert listed == project["optional-dependencies"].keys()


def test_a_gloo_that_cannot_start_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    gloo = fact("gloo")
    assert gloo.state == "broken"
    assert "GLOO_SOCKET_IFNAME" in gloo.hint


def test_small_shared_memory_is_noted_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SMALL_SHM", 1 << 60)
    shared = fact("/dev/shm")
    assert shared.state == "note"
    assert "--shm-size" in shared.hint


@pytest.mark.parametrize(
    ("visible", "built_for", "said"),
    [
        ("", None, "none: CUDA_VISIBLE_DEVICES is empty, so tk computes on the CPU"),
        (None, None, "torch is built for CPUs only"),
        (None, "13.0", "torch, built for CUDA 13.0, finds no usable GPU"),
        ("9", "13.0", "CUDA_VISIBLE_DEVICES is '9'"),
    ],
)
def test_gpus_that_torch_does_not_use_are_explained(
    visible: str | None, built_for: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = fact("GPUs")
    assert said in f"{gpus.value} {gpus.hint}"
    assert gpus.state == ("ok" if visible == "" else "note")


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.13.0+cpu", "ok"),
        ("2.11.0", "ok"),
        ("2.9.1", "broken"),
        ("2.14.0", "note"),
        ("3.0", "note"),
        ("nightly", "broken"),
    ],
)
def test_versions_of_torch_compare_as_numbers(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = machine._torch()
    assert (found.state, found.value.startswith(version)) == (state, True)
    assert state == "ok" or found.hint.endswith("pip install 'torch>=2.11,<2.14'")


def test_the_bounds_of_torch_are_those_of_the_installation() -> None:
    project = tomllib.loads((Path(machine.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    oldest, untested = (".".join(map(str, each)) for each in (OLDEST_TORCH, UNTESTED_TORCH))
    assert f"torch>={oldest},<{untested}" in project["dependencies"]
