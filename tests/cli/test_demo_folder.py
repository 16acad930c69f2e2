"""`tk demo` replaces the files of an earlier demo, and no others."""

from pathlib import Path

import pytest

from tk.cli.main import main


@pytest.mark.parametrize("names", [["run"], ["demo.toml", "thesis"], ["run", "tp1"]])
def test_a_folder_that_no_demo_made_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    """A folder is a demo's only if it has the demo's configuration, since any folder may have a run in it."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "work").write_text("years")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "which no demo made" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name / "work").exists() for name in names)
