"""README's first screen: what tk is, for whom, how to install it, and three commands."""

import re
import shlex
from pathlib import Path

from tk.cli.main import COMMANDS

LINES = 40  # of a screen


def block(text: str, heading: str) -> list[str]:
    """Returns the commands of the first block below a heading, without comments."""
    [found] = re.findall(rf"^## {heading}$.*?^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[:1]
    return [line for line in (re.sub(r"\s+#.*", "", line) for line in found.splitlines()) if line]


def test_the_first_screen_answers_what_for_whom_how_to_install_and_three_commands(root: Path) -> None:
    screen = "\n".join((root / "README.md").read_text().splitlines()[:LINES])
    first = screen.split("\n## ")[0]
    assert first.startswith("# tk: one toolkit from training to deployment\n\n`tk` trains a decoder language model")
    assert "It is for people who" in first
    assert [line for line in block(screen, "Install") if line.startswith("pip install .")]
    commands = [shlex.split(line) for line in block(screen, "Three commands")]
    assert [words[:2] for words in commands] == [["tk", "demo"], ["tk", "generate"], ["tk", "serve"]]
    for _, name, *words in commands:
        COMMANDS[name].load().make_context(name, words)
