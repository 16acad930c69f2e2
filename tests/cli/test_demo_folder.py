"""`tk demo` replaces what an earlier demo made, and nothing else."""

from pathlib import Path

import pytest

from tk.cli.main import main


@pytest.mark.parametrize("names", [["run"], ["demo.toml", "thesis"], ["run", "tp1"]])
def test_a_folder_that_no_demo_made_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    """Any folder may have a run in it: only the demo's own configuration says that it is the demo's."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "work").write_text("years")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "which no demo made" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name / "work").exists() for name in names)
