"""Tests wait for events: machines stall for seconds, and a clock in an event's place makes a test red by chance."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tk.tests.house.syntax import nodes

LEAST_SECONDS = 20  # of a bound for what happens at once on an idle machine
LOOPS, FUNCTIONS = (ast.While, ast.For), (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
PERMITTED = {"tests/parallel/test_link_factory.py: time.sleep(0.5)"}  # nothing shows that a rank is about to leave


def short_waits(text: str) -> Iterator[str]:
    """Yields comparisons of a clock with few seconds, and pauses of fixed length that are no part of a loop."""
    above: dict[ast.AST, ast.AST] = {}
    for node in nodes(text):
        above |= dict.fromkeys(ast.iter_child_nodes(node), node)
        words = ast.unparse(node) if isinstance(node, ast.Compare | ast.Call) else ""
        if isinstance(node, ast.Compare) and any(f"time.{each}()" in words for each in ("monotonic", "perf_counter")):
            bounds = [each.value for each in (node.left, *node.comparators) if isinstance(each, ast.Constant)]
            if any(isinstance(each, int | float) and each < LEAST_SECONDS for each in bounds):
                yield words
        if words.startswith("time.sleep(") and isinstance(node, ast.Call) and isinstance(node.args[0], ast.Constant):
            outside: ast.AST = node
            while not isinstance(outside, (*LOOPS, *FUNCTIONS, ast.Module)):
                outside = above[outside]
            if not isinstance(outside, LOOPS):
                yield words


def test_no_test_rests_on_a_few_seconds(root: Path) -> None:
    found = set()
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "time." in text and "real" not in path.parts:
            found |= {f"{path.relative_to(root)}: {words}" for words in short_waits(text)}
    assert found == PERMITTED, "wait for the event itself, or set the clock"


def test_short_waits_are_seen() -> None:
    short = ["time.monotonic() - begun < 5", "3.0 > time.perf_counter() - begun", "time.sleep(0.1)"]
    assert list(short_waits("\n".join(short))) == short
    fine = ["while waits:\n    time.sleep(0.1)", "time.monotonic() < end", "time.monotonic() - begun < 60"]
    assert not list(short_waits("\n".join(fine)))
