"""The examples of `--help`: click reads each of them, and after `tk demo` they work, in the order of a story."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from tk.cli.main import COMMANDS, command_group
from tk.tests.docs.blocks import REASONS, Block
from tk.tests.docs.shell import commands, parse
from tk.tests.docs.world import World, script_of

NOT_RUN: Final = {
    "tk demo": "takes minutes",  # the folder of the story is one of its own, of few steps
    "tk demo --out runs/demo": "takes minutes",
    "tk parity --layouts default -o docs/parity.md": "takes minutes",
}
# Commands in the order in which a reader can try them: `diff` compares what the demo left, before `train` goes on with
# its run, and those that ask a server follow `serve`.
STORY: Final = (
    *("examples", "init", "diff", "plan", "tokenizer", "data", "train", "plot", "doctor", "reshard", "export"),
    *("inspect", "verify", "eval"),
    *("token", "generate", "serve", "top", "bench"),
)


def commands_below(command: click.Command) -> Iterator[click.Command]:
    """Yields a command and, of a group, the commands inside it."""
    yield command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from commands_below(inner)


def examples(command: click.Command) -> list[str]:
    """Returns the lines of a command's help after "Example:" or "Examples:"."""
    text = f"{command.help or ''}\n\n{command.epilog or ''}"
    return [
        line.strip()
        for found in re.findall(r"Examples?:((?:[ \n]+tk [^\n]*)+)", text)
        for line in found.splitlines()
        if line.strip()
    ]


def examples_of(name: str) -> list[str]:
    """Returns the examples of a command of the table and of the commands inside it, each once."""
    return list(dict.fromkeys(line for each in commands_below(COMMANDS[name].load()) for line in examples(each)))


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_click_reads_every_example(name: str) -> None:
    for command in commands_below(COMMANDS[name].load()) if name else [command_group()]:
        lines = examples(command)
        assert lines, f"{command.name} has no example"
        for line in lines:
            (words,) = commands(line)
            parse(words[1:])


def test_the_story_has_every_example_that_is_not_marked() -> None:
    assert set(NOT_RUN.values()) <= REASONS
    every = {line for name in COMMANDS for line in examples_of(name)} | set(examples(command_group()))
    told = {line for name in STORY for line in examples_of(name)}
    assert every - told == NOT_RUN.keys()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_examples_work_in_the_order_of_a_story(world: World, tmp_path: Path) -> None:
    lines = dict.fromkeys(line for name in STORY for line in examples_of(name))
    with world.copy(tmp_path / "copy") as place:
        place.run(script_of(Block("--help", 1, "sh", "\n".join(lines))), timeout=800)
