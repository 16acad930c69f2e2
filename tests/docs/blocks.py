"""The blocks of code of a page, and the mark with which a page says that a block is not run, or is run elsewhere.

A mark is an HTML comment in the line before a block, which readers do not see: `<!-- not run: takes minutes -->`, or
`<!-- run by tests/real/test_some_page.py -->`, a test that takes the block from the page.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = tuple(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("examples/**/*.md")),
    )
)
# The only reasons for which a block is not run.
REASONS: Final = frozenset({"takes minutes", "needs a network", "needs a cluster"})
KINDS: Final = frozenset({"sh", "python", "toml", "json", "dockerfile", "text"})
PROGRAMS: Final = r"tk|make|python3?|pip|curl|kubectl|docker|torchrun|lm_eval|export|cd|systemctl"

_MARK: Final = re.compile(r"<!-- (?:not run: (?P<reason>.*)|run by (?P<test>\S+)) -->")
# A line of a block without a language that begins so is a shell's.
_COMMAND: Final = re.compile(rf"^(?:\w+=\S* )*(?:{PROGRAMS}) ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: the page's path in the repository.
        line: the number of its first line of code, from 1.
        kind: one of KINDS, or a language that no page may have.
        code: its lines, without the indentation of an item of a list.
        mark: the reason for which it is not run; None = it is run.
        run_by: the test, by its path, that runs it in its own way; None = `test_run_pages.py` does.
    """

    page: str
    line: int
    kind: str
    code: str
    mark: str | None = None
    run_by: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str:
        """The block as a script of a shell; of a text, the commands of tk that it shows, but for a synopsis."""
        if self.kind != "text":
            return self.code if self.kind == "sh" else ""
        lines = (line.strip() for line in self.code.splitlines())
        return "".join(f"{line}\n" for line in lines if line.startswith("tk ") and "[" not in line)


def read_blocks(page: str, text: str) -> Iterator[Block]:
    """Yields the blocks of code of a page in their order."""
    lines = text.splitlines()
    position = 0
    while position < len(lines):
        fence = re.fullmatch(r"( *)```(\w*)", lines[position])
        position += 1
        if fence is None:
            continue
        end = lines.index(f"{fence[1]}```", position)
        code = "\n".join(line.removeprefix(fence[1]) for line in lines[position:end]) + "\n"
        mark = _MARK.fullmatch(lines[position - 2].strip()) if position > 1 else None
        found = mark.groupdict() if mark else {}
        yield Block(page, position + 1, fence[2] or _guessed(code), code, found.get("reason"), found.get("test"))
        position = end + 1


def _guessed(code: str) -> str:
    return "sh" if _COMMAND.search(code) else "text"


def all_blocks() -> tuple[Block, ...]:
    """Returns the blocks of all pages of this checkout."""
    return tuple(block for page in PAGES for block in read_blocks(page, (ROOT / page).read_text()))
