"""Write docs/modules.md from the modules' own first lines (`make map`); a test compares."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "modules.md"
MARK = "<!-- From here on: written by `make map` from the first line of each module. -->\n"
ROOMS = ("cli", "parity", "train", "infer", "model", "data", "parallel", "checkpoint", "proto", "text", "core")


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0]


def module_list() -> str:
    """One heading per room, one line per module."""
    lines = []
    for room in ROOMS:
        lines += ["", f"### {room}/", "", first_line(ROOT / room / "__init__.py"), ""]
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name != "__init__.py" and "_pb2" not in path.name:
                lines.append(f"- [{path.relative_to(ROOT / room)}](../{path.relative_to(ROOT)}): {first_line(path)}")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page: what is written by hand, the mark, the list."""
    by_hand = PAGE.read_text().partition(MARK)[0]
    return by_hand + MARK + module_list()


if __name__ == "__main__":
    PAGE.write_text(page())
