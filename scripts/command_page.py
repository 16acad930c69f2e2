"""Writes docs/commands.md from the commands themselves (`make map`); a test compares the page."""

from collections.abc import Collection, Iterator
from pathlib import Path

import click

from tk.cli.main import COMMANDS, command_group

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
HEAD = """\
# Commands

This page is for users of the program `tk`: it has every option of every command; `tk COMMAND --help` shows the same,
with examples. [README.md](../README.md) has the commands in one table. `make map` writes this page.

## Options of every command

"""


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yields a command, or the commands inside a group, by names like "bench serve"."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from leaves(f"{name} {inner.name}", inner)
    else:
        yield name, command


def section(name: str, command: click.Command, shared: Collection[str | None]) -> str:
    """Returns the part of the page about a command: its purpose, its arguments, and its options that are not shared."""
    context = click.Context(command, info_name=f"tk {name}")
    usage = " ".join([f"tk {name}", *command.collect_usage_pieces(context)])
    purpose = " ".join((command.help or "").split("\n\n")[0].split())
    own = [param for param in command.params if param.name not in shared]
    return f"\n## tk {name}\n\n{purpose}\n\n`{usage}`\n\n{option_table(own, context)}"


def option_table(params: list[click.Parameter], context: click.Context) -> str:
    """Returns a table of the options among the parameters of a command."""
    records = [param.get_help_record(context) for param in params if isinstance(param, click.Option)]
    rows = [f"| `{_in_cell(names)}` | {_in_cell(text)} |\n" for names, text in filter(None, records)]
    return "".join(["| Option | |\n|---|---|\n", *rows])


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    """Returns the whole page."""
    group = command_group()
    context = click.Context(group, info_name="tk")
    shared = {param.name for param in group.params}
    commands = [
        each
        for name in COMMANDS
        if (command := group.get_command(context, name)) is not None
        for each in leaves(name, command)
    ]
    return "".join([HEAD, option_table(group.params, context), *(section(*each, shared) for each in commands)])


if __name__ == "__main__":
    PAGE.write_text(page())
