"""`tk examples`: the examples that come with tk, and a copy of one, to change and to run."""

import ast
import os
import shutil
from pathlib import Path
from typing import Final

import click

from ..core.errors import ConfigError
from .common import PATH

_FOLDER: Final = Path(__file__).parents[1] / "examples"  # of a checkout, and of an installed package
_MADE_BY_RUNS: Final = ("__pycache__", "node_modules")


@click.command(epilog="Example: tk examples tiny.toml --out first.toml")
@click.argument("name", required=False)
@click.option(
    "--out",
    metavar="FILE|FOLDER",
    type=PATH,
    help="Path of the copy, or a folder that exists, to put it into. Default: the current directory.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
def examples(name: str | None, out: Path | None, force: bool) -> None:
    """List the examples that come with tk, or copy NAME, to change it and to run it.

    An example is a configuration, a program or a folder. It says itself how to run it, and which files it needs.
    """
    found = find_examples()
    if name is None:
        if out is not None or force:
            raise click.UsageError("--out and --force are for a copy: give the NAME of an example, too.")
        width = max(map(len, found))
        for each, path in found.items():
            click.echo(f"{each:<{width}}  {about(path).splitlines()[0]}")
        return
    if name not in found:
        raise ConfigError(f"There is no example {name!r}. The examples are {', '.join(found)}.")
    target = copy_example(found[name], out or Path(), force)
    click.echo(f"{target} is a copy of the example {name}.\n\n{about(found[name])}")


def find_examples(folder: Path = _FOLDER) -> dict[str, Path]:
    """Returns the paths of all examples by name, in alphabetical order.

    Raises:
        ConfigError: the installation lacks them.
    """
    if not folder.is_dir():
        raise ConfigError(f"This installation of tk has no examples: {folder} is missing. Install tk again.")
    return {path.name: path for path in sorted(folder.iterdir()) if path.name not in _MADE_BY_RUNS}


def about(path: Path) -> str:
    """Returns what an example says about itself: of a page, its first paragraph; its docstring; its first comment."""
    if path.is_dir():
        return (path / "README.md").read_text(encoding="utf-8").split("\n\n")[1].strip()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    lines = text.splitlines()
    count = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:count])


def copy_example(source: Path, out: Path, force: bool) -> Path:
    """Copies an example; returns the path of the copy.

    Args:
        source: a file or a folder.
        out: the path of the copy, or an existing folder, into which it goes under its own name.
        force: whether files that exist are replaced. Other files of a folder stay.

    Raises:
        ConfigError: the copy would replace something and `force` is not given, or it would replace the example itself.
    """
    target = out / source.name if out.is_dir() else out
    if os.path.lexists(target):
        if target.exists() and target.samefile(source):
            raise ConfigError(f"{target} is the example itself: name another path with --out.")
        if not force:
            raise ConfigError(f"{target} exists already: name another path with --out, or pass --force to replace it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignored = shutil.ignore_patterns(*_MADE_BY_RUNS)
        shutil.copytree(source, target, ignore=ignored, copy_function=shutil.copyfile, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)
    return target
