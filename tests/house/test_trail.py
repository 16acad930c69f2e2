"""The trail of docs/request.md: its functions reach each other, one after the other, through few files."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tk.tests.house.syntax import nodes

# The most files that a reader opens to follow a request; the aim is 15.
MAX_FILES = 19
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` `([\w.]+)` \| (?:`(\w+)` )?(?:from (\d+) )?\|$", re.MULTILINE)


class Step(NamedTuple):
    """A function on the trail.

    Attributes:
        path: its file.
        name: `function` or `Class.method`.
        link: what it and the function that it is reached from both name: one of the two, which the other calls, or
            what passes between them: a message, or where it waits. "" for the first.
        origin: the index of the function that it is reached from.
    """

    path: str
    name: str
    link: str
    origin: int


def trail(root: Path) -> list[Step]:
    """Returns the rows of the page's table."""
    rows = ROW.findall((root / "docs" / "request.md").read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 20
    return [Step(path, name, link, int(origin or i) - 1) for i, (_, path, name, link, origin) in enumerate(rows)]


@cache
def function(path: Path, name: str) -> ast.AST:
    """Returns the syntax of a function."""
    owner, _, own_name = name.rpartition(".")
    found = [node for node in nodes(path.read_text()) if isinstance(node, ast.ClassDef) and node.name == owner]
    body = found[0].body if found else ast.parse(path.read_text()).body
    [function] = [node for node in body if isinstance(node, FUNCTIONS) and node.name == own_name]
    return function


def names_in(step: Step, root: Path) -> set[str]:
    """Returns what a function names: its own name and class, and all names, attributes and annotations in it."""
    named = {*step.name.split(".")}
    for node in ast.walk(function(root / step.path, step.name)):
        named |= {node.id} if isinstance(node, ast.Name) else {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= {node.value}  # an annotation in quotes
    return named


def test_each_function_of_the_trail_reaches_the_next(root: Path) -> None:
    steps = trail(root)
    assert [step.link for step in steps if not step.link] == [""], "only the first is reached from outside"
    wrong = [
        f"{step.path} {step.name} is reached by {step.link}, but {each.name} does not name it"
        for number, step in enumerate(steps[1:], 1)
        for each in (steps[step.origin], step)
        if step.link not in names_in(each, root) or step.origin >= number
    ]
    assert wrong == []


def test_the_trail_is_short(root: Path) -> None:
    files = {step.path for step in trail(root)}
    assert len(files) <= MAX_FILES, f"{len(files)} files: {sorted(files)}"
