"""The commands of a shell script, and the commands of tk among them, which click reads without running them."""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final
from unittest.mock import patch

import click

from tk.cli.common import PathType
from tk.cli.invocation import Invocation
from tk.cli.main import command_group

_HERE_DOCUMENT: Final = re.compile(r"<<\s*['\"]?(\w+)['\"]?([^\n]*)\n(.*?\n)\1\n", re.DOTALL)
_REDIRECTION: Final = re.compile(r"[<>]&?|>>|<<<")
_ASSIGNMENT: Final = re.compile(r"\w+=.*")


def here_documents(script: str) -> list[tuple[str, str]]:
    """Returns the files that a script writes with `cat > FILE <<EOF`, as name and content."""
    names = re.findall(r"cat > (\S+) <<", script)
    return list(zip(names, (found[3] for found in _HERE_DOCUMENT.finditer(script)), strict=True))


def commands(script: str) -> Iterator[list[str]]:
    """Yields the words of each command of a script: those of pipes, lists and `$(...)` one by one.

    Assignments before a command, comments, redirections and here-documents are left out.
    """
    for line in _HERE_DOCUMENT.sub(r"\2\n", script).replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        skip = False
        for word in lexer:
            if skip:
                skip = False
            elif _REDIRECTION.fullmatch(word):
                skip = True
            elif set(word) <= set("();|&"):
                yield from _without_assignments(words)
                words = []
            else:
                words.append(word)
        yield from _without_assignments(words)


def _without_assignments(words: list[str]) -> Iterator[list[str]]:
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if words:
        yield words


def tk_words(words: Sequence[str]) -> list[str] | None:
    """Returns what follows `tk` or `-m tk` in a command, also in one of a Dockerfile; None if tk is not run."""
    if words[0] == "RUN":
        words = words[1:]
    if words[0].rpartition("/")[2] == "tk":
        return list(words[1:])
    for place, pair in enumerate(pairwise(words)):
        if pair == ("-m", "tk"):
            return list(words[place + 2 :])
    return None


def parse(words: Sequence[str]) -> click.Context:
    """Has click read the words after `tk`, as it does before a command runs.

    Files that a command wants to exist need not.

    Raises:
        ValueError: there is no such command, option or value, or an argument is missing or too much.
    """
    try:
        return _context(list(words))
    except click.UsageError as error:
        raise ValueError(f"tk {' '.join(words)}: {error.format_message()}") from error


def _context(rest: list[str]) -> click.Context:
    command: click.Command = command_group()
    context = click.Context(command, info_name="tk", obj=Invocation())
    while isinstance(command, click.Group):
        if not rest:
            raise click.UsageError("A command is missing.", context)
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"No such command {name!r}.", context)
        command = found
    with patch.object(PathType, "convert", _any_path):
        return command.make_context(command.name, rest, parent=context)


def _any_path(_type: PathType, value: str, _param: object, _ctx: object) -> str:
    return value
