"""`tk parity` around its runs: the layouts that it lists, what it prints and writes, and its exit code."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tk.cli.main import main
from tk.cli.parity import checkout_commit
from tk.parity import run as parity_run
from tk.parity.judge import Result
from tk.parity.layout import ParityLayout
from tk.parity.subject import Subject

LAYOUTS = [{"tp": 2}, {"dp": 2, "zero": 1}]


@pytest.fixture
def layouts(tmp_path: Path) -> str:
    """A file of two layouts."""
    path = tmp_path / "layouts.json"
    path.write_text(json.dumps({"layouts": LAYOUTS}))
    return str(path)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ParityLayout]:
    """The layouts that were run, by a stand-in that starts no process and finds the ZeRO layout wrong."""
    layouts: list[ParityLayout] = []

    class ParityRun:
        def __init__(self, *arguments: Any) -> None:
            pass

        def run(self, missing: Sequence[ParityLayout]) -> Iterator[Result]:
            for layout in missing:
                layouts.append(layout)
                yield Result(layout, 1e-7, 1e-6, 0.5 if layout.zero else 1e-7, "model.norm.weight", 1e-7, seconds=1.0)

    monkeypatch.setattr(parity_run, "ParityRun", ParityRun)
    monkeypatch.setattr(Subject, "prepare", lambda self, folder: None)
    return layouts


def test_a_dry_run_lists_layouts_and_starts_nothing(
    layouts: str, ran: list[ParityLayout], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", "--layouts", layouts, "--dry-run"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == [str(ParityLayout(**layout)) for layout in LAYOUTS]  # type: ignore[arg-type]
    assert main(["parity", "--nproc", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tp1 pp1 dp2 zero3 1f1b" in out
    assert "combinations are valid, distinct layouts" in out
    assert "\n  left out " in out, "with every reason"
    assert ran == []


def test_a_layout_that_differs_is_shown_and_the_exit_code_is_1(
    layouts: str, ran: list[ParityLayout], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert main(["parity", "--layouts", layouts, "--steps", "4", "-o", str(page)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 of 2 layouts differ from one process."
    assert lines[1].startswith(str(ParityLayout(dp=2, zero=1)).split()[0]), "the worst layout comes first"
    assert "5.0e-01" in lines[1]
    assert f"tk parity --layouts {layouts} --steps 4 -o {page}" in page.read_text()
    assert ran == [ParityLayout(tp=2), ParityLayout(dp=2, zero=1)]


def test_results_are_kept_and_printed_as_json(
    layouts: str, ran: list[ParityLayout], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["parity", "--layouts", layouts, "--json", "--resume", str(tmp_path / "results.jsonl")]
    assert main(words) == 1
    first = json.loads(capsys.readouterr().out)
    assert [entry["gradients"] for entry in first["layouts"]] == [0.5, 1e-7]
    assert main(words) == 1
    assert json.loads(capsys.readouterr().out) == first
    assert len(ran) == 2, "nothing was run again"


def test_a_page_names_the_commit_of_its_code(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert checkout_commit(tmp_path) == ""
    git("init", "-q")
    assert checkout_commit(tmp_path) == "", "a checkout without a commit"
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    git("tag", "v1")
    commit = git("rev-parse", "--short", "HEAD")
    assert checkout_commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert checkout_commit(tmp_path) == f"{commit} with local changes"
    (tmp_path / "inside").mkdir()
    assert checkout_commit(tmp_path / "inside") == ""
