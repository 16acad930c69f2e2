"""Token folders and tokenizers appear whole, and replace nothing that another program wrote."""

from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.data.publish import new_folder, refuse_existing


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"), new_folder(tmp_path / "file"):
        pytest.fail("the block must not run")

    def interrupted() -> None:
        with new_folder(tmp_path / "made") as folder:
            (folder / "half").write_text("half")
            assert not (tmp_path / "made").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with new_folder(tmp_path / "deep" / "made") as folder:
        (folder / "whole").write_text("whole")
    assert (tmp_path / "deep" / "made" / "whole").read_text() == "whole"


def test_of_two_jobs_for_one_folder_the_first_to_end_wins(tmp_path: Path) -> None:
    def second() -> None:
        with new_folder(tmp_path / "made") as late:
            (late / "name").write_text("second")
            with new_folder(tmp_path / "made") as folder:
                (folder / "name").write_text("first")

    with pytest.raises(ConfigError, match="exists already"):
        second()
    assert (tmp_path / "made" / "name").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_only_files_of_the_names_given_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "ours").write_text("old")
    with new_folder(out, ["ours", "more"]) as folder:
        (folder / "more").write_text("new")
    assert [path.name for path in out.iterdir()] == ["more"]
    (out / "ours").mkdir()
    with pytest.raises(ConfigError, match="holds 'ours', which this command did not write"):
        refuse_existing(out, ["ours", "more"])


def test_a_new_folder_inside_a_new_folder_waits_for_no_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The standard library's corpus is one: its tokenizer and its tokens are new folders inside it."""
    with new_folder(tmp_path / "corpus") as outer, new_folder(outer / "tokens") as inner:
        (inner / "tokens.bin").write_bytes(b"")
    assert [path.name for path in (tmp_path / "corpus" / "tokens").iterdir()] == ["tokens.bin"]
    assert caplog.records == [], "a lock was waited for"
