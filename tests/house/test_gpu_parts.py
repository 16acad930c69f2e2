"""The parts of `make gpu-check`: each alone, one that fails or does not end leaves the others, and one table of all."""

import json
import os
from pathlib import Path

import pytest

from tk.scripts.gpu_parts import FIGURES_VARIABLE, PARTS, GpuPart, PartOutcome, markdown, outcomes_in, run_part

FIGURE = f"""
import json, os
with open(os.environ[{FIGURES_VARIABLE!r}], "a") as file:
    file.write(json.dumps(["products", "744 TFLOP/s"]) + "\\n")
print("measured")
"""


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    """The environment in which commands find small modules."""
    texts = {"measures": FIGURE, "fails": "raise SystemExit(3)", "hangs": "import time; time.sleep(600)"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_a_part_goes_on_after_a_command_that_fails_or_does_not_end(tmp_path: Path, modules: dict[str, str]) -> None:
    part = GpuPart("limits", "limits", (("fails",), ("hangs",), ("measures",)))
    outcome = run_part(part, tmp_path, tmp_path, modules, limit=6)
    assert outcome.result == "fails: exit code 3; hangs: stopped after 3 s"
    assert outcome.figures == (("products", "744 TFLOP/s"),)
    assert not outcome.passed
    assert (tmp_path / "limits.log").read_text() == "measured\n"
    assert outcomes_in(tmp_path) == [outcome]


def test_a_part_of_tests_says_how_many_passed(tmp_path: Path, modules: dict[str, str]) -> None:
    (tmp_path / "says.py").write_text("print('..\\n2 passed, 1 skipped, 7 deselected in 3.41s')")
    outcome = run_part(GpuPart("kernels", "k", (("says",), ("fails",))), tmp_path, tmp_path, modules)
    assert (outcome.passed, outcome.result) == (False, "2 passed, 1 skipped, 7 deselected; fails: exit code 3")


@pytest.mark.parametrize("said", ["3 skipped, 7 deselected in 3.41s", "7 deselected in 0.12s", "collected nothing"])
def test_a_part_whose_tests_are_all_skipped_is_red(said: str, tmp_path: Path, modules: dict[str, str]) -> None:
    (tmp_path / "pytest.py").write_text(f"print({said!r})")
    outcome = run_part(GpuPart("kernels", "k", (("pytest",),)), tmp_path, tmp_path, modules)
    assert not outcome.passed
    assert outcome.result.endswith("pytest: no test ran")
    (tmp_path / "pytest.py").write_text("print('1 passed, 3 skipped in 3.41s')")
    assert run_part(GpuPart("kernels", "k", (("pytest",),)), tmp_path, tmp_path, modules).passed


def test_the_table_has_all_parts_that_ran_also_in_earlier_calls(tmp_path: Path, modules: dict[str, str]) -> None:
    for name in ("saves", "limits"):
        run_part(GpuPart(name, f"what {name} shows", (("measures",),)), tmp_path, tmp_path, modules)
    found = outcomes_in(tmp_path)
    assert [each.name for each in found] == ["limits", "saves"], "in the order of PARTS"
    text = markdown("on a card", [*found, PartOutcome("decode", "d", True, "a | b", 2.4)])
    assert text.startswith("on a card\n\n| part | shows | result | seconds |\n|---|---|---|---|\n| limits |")
    assert "| decode | d | a / b | 2 |" in text
    assert text.count("| products | 744 TFLOP/s |") == 2


def test_every_part_names_files_and_benchmarks_that_exist(root: Path) -> None:
    from tk.benchmarks.gpu_contender import RUNS

    for part in PARTS:
        for module, *arguments in part.commands:
            if module == "pytest":
                paths = [each for each in arguments if each.startswith("tests/")]
                assert paths
                assert all((root / path).exists() for path in paths)
            else:
                assert arguments[0] in RUNS
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_figures_are_lines_that_a_part_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tk.benchmarks.gpu_model import figure

    monkeypatch.setenv(FIGURES_VARIABLE, str(tmp_path / "figures"))
    figure("tk", "41,309 tokens/s")
    assert json.loads((tmp_path / "figures").read_text()) == ["tk", "41,309 tokens/s"]
