"""`tk doctor`: a table for people, JSON for scripts, exit code 1 if a required part is broken."""

import json
import os
import sys

import pytest
import torch
from click.testing import CliRunner

from tk.cli.doctor import doctor
from tk.cli.machine import examine


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
