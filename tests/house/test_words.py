"""Plain words: docstrings, messages and pages say who does which thing, without crutches such as "whoever"."""

import ast
import re
from pathlib import Path

from tk.tests.house.syntax import nodes

CRUTCHES = re.compile(r"\b(whoever|nobody|somebody|told|tells?|aside|settles?|speaks)\b", re.IGNORECASE)


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
