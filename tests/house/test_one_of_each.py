"""One of each: children of Python, divisions upwards, ignored labels, locked runs and aborted calls have one place."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.tests.house.syntax import nodes

COMMUNICATES = re.compile(r"all_|reduce|broadcast|send|recv|isend|irecv|batch_isend|barrier|gather|scatter|monitored")


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


def makes_a_locked_run(node: ast.AST) -> bool:
    """Returns whether a node constructs a LockedRun, which only a run folder's lock gives."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LockedRun"


def aborts_a_call(node: ast.AST) -> bool:
    """Returns whether a node ends a call of grpc, which then keeps its frames until garbage is searched for."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "context.abort"


ONE_PLACE = [
    ("infer/serve/grpc/status.py", aborts_a_call),
    ("core/process.py", starts_python),
    ("core/integers.py", divides_upwards),
    ("core/labels.py", names_ignored_labels),
    ("checkpoint/run/run_folder.py", makes_a_locked_run),
]


def calls_a_collective(node: ast.AST) -> bool:
    """Returns whether a node names a function of torch.distributed that communicates."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist" and bool(COMMUNICATES.match(node.attr))


def test_only_parallel_calls_collectives_of_torch(root: Path, sources: list[Path]) -> None:
    found = {path for path in sources for node in nodes((root / path).read_text()) if calls_a_collective(node)}
    assert {path.parts[0] for path in found} == {"parallel"}


@pytest.mark.parametrize(("place", "is_one"), ONE_PLACE)
def test_there_is_one_of_each(root: Path, sources: list[Path], place: str, is_one: Callable[[ast.AST], bool]) -> None:
    found = {str(path) for path in sources for node in nodes((root / path).read_text()) if is_one(node)}
    assert found == {place}


@pytest.mark.parametrize(
    ("is_one", "text"),
    [
        (starts_python, "subprocess.run([sys.executable, '-m', 'tk'])"),
        (divides_upwards, "-(-size // 8) * 8"),
        (names_ignored_labels, "IGNORED: Final = -100"),
        (names_ignored_labels, "IGNORED = -1"),
        (makes_a_locked_run, "run = LockedRun(path, attempt, ())"),
        (aborts_a_call, "await context.abort(code, text)"),
        (calls_a_collective, "dist.all_gather_into_tensor(whole, part)"),
    ],
)
def test_another_one_is_seen(is_one: Callable[[ast.AST], bool], text: str) -> None:
    assert any(is_one(node) for node in nodes(text))
