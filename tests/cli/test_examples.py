"""`tk examples`: the list, a copy that replaces nothing, and examples that say what they need and how they run."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tk.cli.examples import about, examples, find_examples
from tk.cli.main import COMMANDS, main
from tk.core.config import load_toml
from tk.core.errors import ConfigError
from tk.parity.layouts_file import read_layouts
from tk.parity.subject import Subject
from tk.train.config.train_config import TrainConfig

FOUND = find_examples()
CONFIGURATIONS = sorted(name for name, path in FOUND.items() if path.suffix == ".toml" and "layouts" not in name)
LAYOUTS = sorted(name for name in FOUND if name.endswith("layouts.toml"))


def files(folder: Path) -> dict[str, bytes]:
    """Returns the content of all files in a folder, by their paths in it."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_each_example_has_a_line_in_the_list() -> None:
    shown = CliRunner().invoke(examples, []).output.splitlines()
    assert [line.split()[0] for line in shown] == list(FOUND)
    assert {"clients", "deploy", "tiny.toml", "stream.py"} <= set(FOUND)
    assert all(re.fullmatch(r"\S+ +[A-Z].{20,118}[.;]\S*.*", line) for line in shown), shown


def test_a_copy_is_the_example_and_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "tiny.toml"]) == 0
    assert capsys.readouterr().out.endswith("\n  tk train tiny.toml\n")
    copy = tmp_path / "tiny.toml"
    assert copy.read_bytes() == FOUND["tiny.toml"].read_bytes()
    copy.write_text("mine")
    assert main(["examples", "tiny.toml"]) == 2
    assert "tiny.toml exists already" in capsys.readouterr().err
    assert copy.read_text() == "mine"
    assert main(["examples", "tiny.toml", "--force"]) == 0
    assert copy.read_bytes() == FOUND["tiny.toml"].read_bytes()


def test_out_is_the_path_of_the_copy_or_an_existing_folder_for_it(tmp_path: Path) -> None:
    assert main(["examples", "tiny.toml", "--out", str(tmp_path / "new" / "mine.toml")]) == 0
    assert main(["examples", "stream.py", "--out", str(tmp_path / "new")]) == 0
    assert sorted(files(tmp_path)) == ["new/mine.toml", "new/stream.py"]


def test_a_link_that_leads_nowhere_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").symlink_to("elsewhere")
    assert main(["examples", "tiny.toml", "--out", str(tmp_path)]) == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", [name for name, path in FOUND.items() if path.is_dir()])
def test_a_folder_is_copied_whole_and_without_links_that_lead_out_of_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / name
    assert main(["examples", name, "--out", str(copy)]) == 0
    assert files(copy) == files(FOUND[name])
    assert not [path for path in copy.rglob("*") if path.is_symlink()]
    assert main(["examples", name, "--out", str(tmp_path)]) == 2
    assert f"{copy} exists already" in capsys.readouterr().err
    (copy / "README.md").write_text("mine")
    (copy / "notes").write_text("mine")
    assert main(["examples", name, "--out", str(tmp_path), "--force"]) == 0
    assert files(copy) == files(FOUND[name]) | {"notes": b"mine"}


def test_the_example_itself_is_never_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "tiny.toml", "--out", str(FOUND["tiny.toml"].parent), "--force"]) == 2
    assert "is the example itself" in capsys.readouterr().err


def test_a_name_that_no_example_has_is_an_error_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "../pyproject.toml"]) == 2
    assert "The examples are clients, deploy," in capsys.readouterr().err
    assert main(["examples", "--out", "here"]) == 2
    assert "give the NAME" in capsys.readouterr().err


def test_an_installation_without_examples_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no examples"):
        find_examples(tmp_path / "examples")


def test_what_runs_leave_is_no_example(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "a.toml").touch()
    assert list(find_examples(tmp_path)) == ["a.toml"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_valid_and_names_the_files_that_it_needs(name: str) -> None:
    config = load_toml(FOUND[name], TrainConfig)
    assert config.layout(8).world_size == 8
    paths = [config.model.init, config.data.tokenizer]
    paths += [each.path for each in config.data.sources] if config.data.sources != "stdlib" else []
    needed = [str(path) for path in paths if path]
    head = about(FOUND[name])
    assert not needed or "Needs " in head
    assert [path for path in needed if path not in head] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_can_be_read(name: str, tmp_path: Path) -> None:
    assert read_layouts(FOUND[name], Subject.built_in(tmp_path, 10, "fp32"), 16)


@pytest.mark.parametrize("name", FOUND)
def test_the_commands_that_an_example_names_exist(name: str) -> None:
    """Words, options and other examples; no command names a file by a folder that only a checkout has."""
    for line in re.findall(r"^ +tk (.+)$", about(FOUND[name]), re.MULTILINE):
        first, *words = shlex.split(line, comments=True)
        command = COMMANDS[first].load()
        if isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context(f"tk {first}", [*words])
        assert "examples/" not in line
        assert first != "examples" or words[0] in FOUND


@pytest.mark.parametrize("name", [name for name in FOUND if name.endswith(".py")])
def test_a_program_compiles(name: str) -> None:
    assert ast.parse(FOUND[name].read_text())
