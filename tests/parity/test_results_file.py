"""The file of results: they are read back, but for failures and torn lines."""

from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.parity.results_file import ResultsFile
from tk.tests.parity.test_report import DEAD, GOOD, WRONG


def test_results_are_read_back_but_for_failures_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, {"steps": 10}) as results:
        for result in (GOOD, DEAD, WRONG):
            results.add(result)
    path.write_text(path.read_text()[:-20])
    with ResultsFile(path, {"steps": 10}) as results:
        assert results.done == {GOOD.layout: GOOD}
        results.add(WRONG)
    with ResultsFile(path, {"steps": 10}) as results:
        assert set(results.done) == {GOOD.layout, WRONG.layout}
    with pytest.raises(ConfigError, match=r"optimizer\.eps = absent, now 1e-06, steps = 10, now 50\)"):
        ResultsFile(path, {"steps": 50, "optimizer": {"eps": 1e-6}})
    (tmp_path / "notes.txt").write_text("notes\n")
    with pytest.raises(ConfigError, match="its first line holds none"):
        ResultsFile(tmp_path / "notes.txt", {"steps": 10})
    with pytest.raises(ConfigError, match="Cannot use"):
        ResultsFile(tmp_path, {})
