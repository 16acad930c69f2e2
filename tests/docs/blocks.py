"""The blocks of code of a page, and the mark with which a page says that a block is not run.

A mark is an HTML comment in the line before a block, as in `<!-- not run: takes minutes -->`: readers do not see it.
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
REASONS: Final = frozenset(
    {"takes minutes", "needs a network", "needs 8 GPUs", "needs a cluster", "needs another project's package"}
)
KINDS: Final = frozenset({"sh", "python", "toml", "json", "dockerfile", "text"})
PROGRAMS: Final = r"tk|make|python3?|pip|curl|kubectl|docker|torchrun|lm_eval|export|cd|systemctl"

_MARK: Final = re.compile(r"<!-- not run: (.*) -->")
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
    """

    page: str
    line: int
    kind: str
    code: str
    mark: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def shown_commands(self) -> str:
        """The commands of tk in a text, as of the output of one, as a script; a synopsis with brackets is none."""
        lines = (line.strip() for line in self.code.splitlines() if self.kind == "text")
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
        yield Block(page, position + 1, fence[2] or _guessed(code), code, mark and mark[1])
        position = end + 1


def _guessed(code: str) -> str:
    return "sh" if _COMMAND.search(code) else "text"


def all_blocks() -> tuple[Block, ...]:
    """Returns the blocks of all pages of this checkout."""
    return tuple(block for page in PAGES for block in read_blocks(page, (ROOT / page).read_text()))
