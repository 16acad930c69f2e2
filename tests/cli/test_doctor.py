"""`tk doctor`: a table for people, JSON for scripts, exit code 1 if a required part is broken."""

import json
import os
import sys

import pytest
import torch
from click.testing import CliRunner

from tk.cli import machine
from tk.cli.doctor import doctor
from tk.cli.machine import Fact, examine, is_new_enough


def test_it_describes_this_machine() -> None:
    shown = CliRunner().invoke(doctor, ["--json"])
    assert shown.exit_code == 0, shown.output
    facts = {fact["name"]: fact["value"] for fact in json.loads(shown.stdout)["facts"]}
    assert facts["torch"].startswith(str(torch.__version__))
    assert facts["cores"].startswith(str(len(os.sched_getaffinity(0))))
    assert facts["gloo"] == "starts"
    assert {"memory", "/dev/shm", "disk", "network", "open files", "device", "backend", "threads"} <= set(facts)


def test_a_broken_part_is_marked_with_its_remedy_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = examine()
    assert [fact.name for fact in facts if fact.state == "broken"] == ["torch"]
    shown = CliRunner().invoke(doctor, [])
    assert shown.exit_code == 1
    assert "x torch" in shown.stdout
    assert "pip install 'torch>=2.11'" in shown.stdout


def test_a_gloo_that_cannot_start_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    gloo = next(fact for fact in examine() if fact.name == "gloo")
    assert gloo.state == "broken"
    assert "GLOO_SOCKET_IFNAME" in gloo.hint


def test_small_shared_memory_is_noted_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SMALL_SHM", 1 << 60)
    shared: Fact = next(fact for fact in examine() if fact.name == "/dev/shm")
    assert shared.state == "note"
    assert "--shm-size" in shared.hint


@pytest.mark.parametrize(
    ("version", "fits"), [("2.13.0+cpu", True), ("2.11.0", True), ("2.9.1", False), ("3.0", True), ("nightly", False)]
)
def test_versions_compare_as_numbers(version: str, fits: bool) -> None:
    assert is_new_enough(version) is fits
