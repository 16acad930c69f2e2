"""Writes docs/modules.md from the first lines of the modules' docstrings (`make map`); a test compares the page."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "modules.md"
MARK = "<!-- From here on: written by `make map` from the first line of each module. -->\n"
ROOMS = ("cli", "parity", "train", "infer", "model", "data", "parallel", "checkpoint", "proto", "text", "core")


def first_line(path: Path) -> str:
    """Returns the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0]


def module_list() -> str:
    """Returns the list of modules: one heading per package, one line per module."""
    lines = []
    for room in ROOMS:
        lines += ["", f"## {room}/", "", first_line(ROOT / room / "__init__.py"), ""]
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name != "__init__.py" and "_pb2" not in path.name:
                lines.append(f"- [{path.relative_to(ROOT / room)}](../{path.relative_to(ROOT)}): {first_line(path)}")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Returns the whole page: the part that is written by hand, the mark, and the list."""
    by_hand = PAGE.read_text().partition(MARK)[0]
    return by_hand + MARK + module_list()


if __name__ == "__main__":
    PAGE.write_text(page())
