"""One of each: a child of Python, a division that rounds up and an ignored label each have one place in the house."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest


def starts_python(node: ast.AST) -> bool:
    """Returns whether a node names Python's interpreter, as a command that runs a module of Python does."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"


def divides_upwards(node: ast.AST) -> bool:
    """Returns whether a node is -(-a // b)."""
    match node:
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub()), ast.FloorDiv())):
            return True
    return False


def names_ignored_labels(node: ast.AST) -> bool:
    """Returns whether a node sets a name to the label that the loss leaves out."""
    targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
    return any(isinstance(each, ast.Name) and each.id == "IGNORED" for each in targets)


ONE_PLACE = [
    ("core/process.py", starts_python),
    ("core/integers.py", divides_upwards),
    ("core/labels.py", names_ignored_labels),
]


@pytest.mark.parametrize(("place", "is_one"), ONE_PLACE)
def test_there_is_one_of_each(root: Path, sources: list[Path], place: str, is_one: Callable[[ast.AST], bool]) -> None:
    found = {str(path) for path in sources for node in ast.walk(ast.parse((root / path).read_text())) if is_one(node)}
    assert found == {place}


@pytest.mark.parametrize(
    ("is_one", "text"),
    [
        (starts_python, "subprocess.run([sys.executable, '-m', 'tk'])"),
        (divides_upwards, "-(-size // 8) * 8"),
        (names_ignored_labels, "IGNORED: Final = -100"),
        (names_ignored_labels, "IGNORED = -1"),
    ],
)
def test_another_one_is_seen(is_one: Callable[[ast.AST], bool], text: str) -> None:
    assert any(is_one(node) for node in ast.walk(ast.parse(text)))
