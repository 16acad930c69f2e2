"""Plain words: docstrings, messages and pages say who does which thing, without crutches such as "whoever"."""

import ast
import re
from pathlib import Path

from tk.tests.house.syntax import nodes

CRUTCHES = re.compile(r"\b(whoever|nobody|somebody|told|tells?|aside|settles?|speaks)\b", re.IGNORECASE)

EMPTY = {"the", "a", "an", "it", "their", "of", "thi", "that", "number"}  # without the s at their ends


def crutches(text: str) -> list[str]:
    """Returns the strings of a module, docstrings among them, that use a crutch, as "line: word"."""
    return [
        f"{node.lineno}: {found[0]}"
        for node in nodes(text)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := CRUTCHES.search(node.value))
    ]


def test_modules_use_plain_words(root: Path, sources: list[Path]) -> None:
    assert [f"{path}:{where}" for path in sources for where in crutches((root / path).read_text())] == []


def test_pages_use_plain_words(root: Path) -> None:
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    assert len(pages) > 20
    found = [f"{page.name}: {word[0]}" for page in pages for word in CRUTCHES.finditer(page.read_text())]
    assert found == []


def test_a_crutch_is_seen() -> None:
    assert crutches('def f():\n    """Returns what it is told."""') == ["2: told"]
    assert crutches("raise TkError(f'Nobody owns {name}.')") == ["1: Nobody"]
    assert crutches("aside = 1") == []


def named_by_itself(text: str) -> list[str]:
    """Returns the entries of docstrings that say no more than their name does, as "engine: the engine."."""
    found = []
    for node in nodes(text):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        lines = (ast.get_docstring(node) or "").splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=False):
            entry = re.fullmatch(r" {4}(\w+): (.*)", line)
            if entry is None or following.startswith(" " * 5):  # it goes on
                continue
            said = {word.rstrip("s") for word in re.findall(r"[a-z]+", entry[2].lower())} - EMPTY
            if said and said <= {word.rstrip("s") for word in entry[1].lower().split("_")}:
                found.append(f"{node.lineno}: {line.strip()}")
    return found


def test_arguments_are_not_documented_by_their_own_name(root: Path, sources: list[Path]) -> None:
    assert [f"{path}:{line}" for path in sources for line in named_by_itself((root / path).read_text())] == []


def test_an_argument_that_is_documented_by_its_own_name_is_seen() -> None:
    entries = "engine: the engine.\n        num_rows: the number of rows.\n        log: the log of calls.\n"
    wrong = named_by_itself(
        f'def f():\n    """Does.\n\n    Args:\n        {entries}        row: the row\n            of it.\n    """'
    )
    assert wrong == ["1: engine: the engine.", "1: num_rows: the number of rows."]
