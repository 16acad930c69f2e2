"""docs/troubleshooting.md against the code: a section for every mistake of the table, every class and exit code."""

import ast
import re
from pathlib import Path

import pytest

from tk.cli.main import command_group
from tk.tests.cli.test_mistakes import MISTAKES
from tk.tests.house.pages import anchor_of, sections
from tk.tests.house.syntax import nodes

PAGE = "docs/troubleshooting.md"
LEAST_WORDS = 8  # of a section, beside its heading


def error_classes(root: Path, sources: list[Path]) -> dict[str, int]:
    """Returns the public classes of errors with their exit codes: those whose bases lead to TkError."""
    classes = [node for path in sources for node in nodes((root / path).read_text()) if isinstance(node, ast.ClassDef)]
    codes = {"TkError": 1}
    while new := [each for each in classes if each.name not in codes and _bases(each) & codes.keys()]:
        for each in new:
            inherited = next(codes[base] for base in _bases(each) if base in codes)
            codes[each.name] = next(iter(_assigned(each)), inherited)
    return {name: code for name, code in codes.items() if not name.startswith("_")}


def _bases(node: ast.ClassDef) -> set[str]:
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def _assigned(node: ast.ClassDef) -> list[int]:
    """Returns the exit code that the body of a class sets, in a list."""
    return [
        line.value.value
        for line in node.body
        if isinstance(line, ast.Assign)
        and isinstance(line.value, ast.Constant)
        and ast.unparse(line.targets[0]) == "exit_code"
        and isinstance(line.value.value, int)
    ]


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_has_a_section(name: str, root: Path) -> None:
    section = sections(root / PAGE).get(MISTAKES[name].section, "")
    assert len(section.split()) > LEAST_WORDS, f"{PAGE} has no section #{MISTAKES[name].section}"


def test_every_class_of_errors_is_named_with_its_exit_code(root: Path, sources: list[Path]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d) \|", (root / PAGE).read_text(), re.MULTILINE)
    assert {name: int(code) for name, code in rows} == error_classes(root, sources)


def test_every_exit_code_is_explained(root: Path) -> None:
    codes = set(re.findall(r"^\| (\d+) \|", (root / PAGE).read_text(), re.MULTILINE))
    assert codes == set(re.findall(r"(\d+) [a-z]", (command_group().epilog or "").partition("Exit codes:")[2]))


@pytest.mark.parametrize(
    ("heading", "anchor"), [("`--http`: a port", "--http-a-port"), ("exceeds max_len", "exceeds-max_len")]
)
def test_anchors_are_those_of_links(heading: str, anchor: str) -> None:
    assert anchor_of(heading) == anchor
