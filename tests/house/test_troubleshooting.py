"""docs/troubleshooting.md against the code: a section for every mistake of the table, every class and exit code."""

import re
from pathlib import Path

import pytest

from tk.cli.main import command_group
from tk.tests.cli.test_mistakes import MISTAKES
from tk.tests.house.pages import anchor_of, sections

PAGE = "docs/troubleshooting.md"
CLASS = re.compile(r"^class (\w+)\(([^)]*)\):\n((?:(?:    .*)?\n)*)", re.MULTILINE)  # name, bases and body
LEAST_WORDS = 8  # of a section, beside its heading


def error_classes(root: Path, sources: list[Path]) -> dict[str, int]:
    """Returns the public classes of errors with their exit codes: those whose bases lead to TkError."""
    classes = [found.groups() for path in sources for found in CLASS.finditer((root / path).read_text())]
    codes = {"TkError": 1}
    while new := [each for each in classes if each[0] not in codes and _known(each[1], codes)]:
        for name, bases, body in new:
            own = re.search(r"^    exit_code = (\d)$", body, re.MULTILINE)
            codes[name] = int(own[1]) if own else codes[_known(bases, codes)[0]]
    return {name: code for name, code in codes.items() if not name.startswith("_")}


def _known(bases: str, codes: dict[str, int]) -> list[str]:
    return [base for base in bases.split(", ") if base in codes]


def test_every_mistake_has_a_section(root: Path) -> None:
    found = sections(root / PAGE)
    short = {name for name, each in MISTAKES.items() if len(found.get(each.section, "").split()) <= LEAST_WORDS}
    assert short == set(), f"{PAGE} has no section for these, or a short one"


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
