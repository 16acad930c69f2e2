"""What is no TOML is named as what it is."""

import tomllib
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.core.not_toml import parse_toml, unreadable

TOML = '[train]\nsteps = 20\n[checkpoint]\ndir = "runs/a: b"\n'


@pytest.mark.parametrize("data", [TOML.encode(), TOML.encode("utf-8-sig"), TOML.replace("\n", "\r\n").encode()])
def test_toml_of_any_editor_is_read(data: bytes) -> None:
    assert parse_toml(data, "a.toml") == tomllib.loads(TOML)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("train:\n  steps: 20\n", "looks like YAML"),
        ("---\ntrain: {steps: 20}\n", "looks like YAML"),
        ('{"train": {"steps": 20}}', "looks like JSON"),
        ("[train]\nsteps = twenty\n", "in quotes"),
        ("[train]\ncompile = True\n", "lower case"),
        ("[train]\nsteps = 1\nsteps = 2\n", "stands there twice"),
        ("[train]\n[train]\n", "stands there twice"),
        ("[train]\nsteps 20\n", r"a line such as steps = 20"),
    ],
)
def test_what_would_be_right_is_said(text: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.toml is not valid TOML: .*line \d.*{advice}"):
        parse_toml(text.encode(), "a.toml")


@pytest.mark.parametrize(("data", "reason"), [(TOML.encode("utf-16"), "UTF-16"), (b"# gr\xfc\xdfe", "byte 4")])
def test_other_encodings_are_named(data: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.toml is not valid TOML: .*{reason}"):
        parse_toml(data, "a.toml")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (IsADirectoryError(21, "Is a directory"), "not its folder"),
        (FileNotFoundError(2, "No such file"), "tk init"),
        (PermissionError(13, "Permission denied"), "allowed to read"),
    ],
)
def test_a_file_that_is_not_read_has_its_advice(error: OSError, advice: str, tmp_path: Path) -> None:
    assert advice in str(unreadable(tmp_path / "a.toml", error))
