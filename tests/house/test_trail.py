"""The trail of docs/request.md: its functions reach each other, one after the other, through few files."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tk.tests.house.syntax import nodes

MAX_FILES = 15
MAX_FILES_WITH_DETOURS = 19
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTION = r"`([\w/]+\.py)` `([\w.]+)`"
STEP = re.compile(rf"^\| (\d+) \| {FUNCTION} \| (?:`(\w+)` )?\|$", re.MULTILINE)
DETOUR = re.compile(rf"^\| {FUNCTION} \| {FUNCTION} \|$", re.MULTILINE)


class Function(NamedTuple):
    """A function that the page names, as `function` or `Class.method`, and its file."""

    path: str
    name: str


def trail(root: Path) -> list[tuple[Function, str]]:
    """Returns the functions of the trail, each with what it and the one before it both name; "" for the first.

    That is one of the two, which the other calls, or what passes between them: a message, or where it waits.
    """
    rows = STEP.findall((root / "docs" / "request.md").read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 20
    return [(Function(path, name), link) for _, path, name, link in rows]


def detours(root: Path) -> list[tuple[Function, Function]]:
    """Returns the functions that are called on the way and return, each with the one that calls it."""
    rows = DETOUR.findall((root / "docs" / "request.md").read_text())
    assert rows
    return [(Function(path, name), Function(*caller)) for path, name, *caller in rows]


def named(root: Path) -> set[Function]:
    """Returns all functions of both tables."""
    both = {function for function, _ in trail(root)} | {each for pair in detours(root) for each in pair}
    assert len(both) > 25
    return both


@cache
def syntax_of(path: Path, name: str) -> ast.AST:
    """Returns the syntax of a function."""
    owner, _, own_name = name.rpartition(".")
    found = [node for node in nodes(path.read_text()) if isinstance(node, ast.ClassDef) and node.name == owner]
    body = found[0].body if found else ast.parse(path.read_text()).body
    [function] = [node for node in body if isinstance(node, FUNCTIONS) and node.name == own_name]
    return function


def names_in(function: Function, root: Path) -> set[str]:
    """Returns what a function names: its own name and class, and all names, attributes and annotations in it."""
    found = {*function.name.split(".")}
    for node in ast.walk(syntax_of(root / function.path, function.name)):
        found |= {node.id} if isinstance(node, ast.Name) else {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value}  # an annotation in quotes
    return found


def test_each_function_of_the_trail_reaches_the_next(root: Path) -> None:
    steps = trail(root)
    assert [link for _, link in steps if not link] == [""], "only the first is reached from outside"
    wrong = [
        f"{function.path} {function.name} is reached by {link}, but {each.name} does not name it"
        for (before, _), (function, link) in pairwise(steps)
        for each in (before, function)
        if link not in names_in(each, root)
    ]
    assert wrong == []


def test_detours_begin_where_the_page_says(root: Path) -> None:
    wrong = [
        f"{caller.path} {caller.name} does not call {function.name}"
        for function, caller in detours(root)
        if function.name.rpartition(".")[2] not in names_in(caller, root) - {*caller.name.split(".")}
    ]
    assert wrong == []


def test_the_trail_is_short(root: Path) -> None:
    files = {function.path for function, _ in trail(root)}
    assert len(files) <= MAX_FILES, f"{len(files)} files: {sorted(files)}"
    files = {function.path for function in named(root)}
    assert len(files) <= MAX_FILES_WITH_DETOURS, f"{len(files)} files: {sorted(files)}"
