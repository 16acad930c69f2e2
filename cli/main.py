"""The command `tk`: finds the command's module, runs it, and turns errors into one paragraph and an exit code.

Commands are listed from a table and imported only when used, so that `tk --help` answers at once and loads no torch.
A command returns nothing, or leaves with another exit code by `ctx.exit(code)`.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import click

from .. import __version__
from ..core.errors import TkError

EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True)
class CommandEntry:
    """Where a command lives ("module:function") and what its line in `tk --help` says.

    Attributes:
        unwinds: whether SIGTERM and SIGHUP unwind it as Ctrl-C does; else it decides on signals itself.
    """

    target: str
    summary: str
    unwinds: bool = True

    def load(self) -> click.Command:
        module, function = self.target.split(":")
        command: click.Command = getattr(import_module(module), function)
        return command


COMMANDS: Final[Mapping[str, CommandEntry]] = MappingProxyType(
    {
        "demo": CommandEntry("tk.cli.demo:demo", "The whole story on this machine, from text to a served model."),
        "train": CommandEntry("tk.cli.train:train", "Train a model, on one rank or many.", unwinds=False),
        "data": CommandEntry("tk.cli.data:data", "Turn text into token files."),
        "tokenizer": CommandEntry("tk.cli.tokenizer:tokenizer", "Train a byte-level BPE tokenizer.", unwinds=False),
        "plan": CommandEntry("tk.cli.plan:plan", "Show the memory, waiting and traffic of a run before it starts."),
        "plot": CommandEntry("tk.cli.plot:plot", "Draw the loss, rate, gradient norm and speed of runs."),
        "doctor": CommandEntry("tk.cli.doctor:doctor", "Show what this machine has and what is missing."),
        "parity": CommandEntry("tk.cli.parity:parity", "Compare every layout with one process."),
        "reshard": CommandEntry("tk.cli.reshard:reshard", "Rewrite a checkpoint for another parallel layout."),
        "export": CommandEntry("tk.cli.export:export", "Write a checkpoint as a Hugging Face folder."),
        "inspect": CommandEntry("tk.cli.inspect:inspect", "Show what a checkpoint holds."),
        "verify": CommandEntry("tk.cli.verify:verify", "Check every byte of a checkpoint."),
        "diff": CommandEntry("tk.cli.diff:diff", "Compare the tensors of two checkpoints."),
        "serve": CommandEntry("tk.cli.serve:serve", "Serve a checkpoint over gRPC."),
        "generate": CommandEntry("tk.cli.generate:generate", "Continue a prompt, from a server or a checkpoint."),
    }
)


@dataclass
class Invocation:
    """What the whole invocation shares; `debug` asks for tracebacks."""

    debug: bool = False


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_object(Invocation).debug = True  # type: ignore[union-attr]  # main() always passes one


def debug_option() -> click.Option:
    """`--debug`, accepted by `tk` itself and by every command below it."""
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Tracebacks on errors."
    )


def _accept_debug(command: click.Command) -> None:
    """Add `--debug` to a command and to the commands inside it, once."""
    if any(param.name == "debug" for param in command.params):
        return
    command.params.append(debug_option())
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _accept_debug(inner)


class LazyGroup(click.Group):
    """A click group over a table of commands, importing one only to run it or to show its own help."""

    def __init__(self, table: Mapping[str, CommandEntry], **attributes: Any) -> None:
        super().__init__(**attributes)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        command = entry.load()
        _accept_debug(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.table and not name.startswith("-"):
            nearest = get_close_matches(name, self.table, n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Commands: {', '.join(self.table)}."
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        found = super().resolve_command(ctx, args)
        if name in self.table and self.table[name].unwinds:
            from .signals import signals_unwind

            ctx.with_resource(signals_unwind())
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.table.items()])


def command_group(table: Mapping[str, CommandEntry] = COMMANDS) -> LazyGroup:
    """The group `tk` over `table`."""
    version = click.version_option(__version__, prog_name="tk", message="%(prog)s %(version)s")
    group = LazyGroup(
        table,
        name="tk",
        params=[debug_option()],
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train a language model over many devices, reshard its checkpoint, serve it over gRPC.",
        epilog="Example: tk demo --out demo\n\n"
        "Exit codes: 0 done, 1 failed or ended by SIGTERM or SIGHUP, 2 wrong usage or config, 3 checkpoint unusable, "
        "130 interrupted.",
    )
    return version(group)


def _explain(error: Exception) -> tuple[str, int]:
    """The paragraph and the exit code for an error that ended a command."""
    if isinstance(error, TkError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        return (f"{error.strerror}: {error.filename}" if error.filename else str(error)), 1
    return f"{type(error).__name__}: {error}\nThis is a fault in tk; --debug shows where.", 1


def main(args: Sequence[str] | None = None, group: click.Group | None = None) -> int:
    """Run one command line and return its exit code; the epilog of `tk --help` lists them.

    Args:
        args: the words after `tk`; the process's own if None.
        group: the commands to choose from; those of `COMMANDS` if None.
    """
    invocation = Invocation()
    try:
        code = (group or command_group()).main(args, prog_name="tk", standalone_mode=False, obj=invocation)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if invocation.debug:
            traceback.print_exc()
        message, code = _explain(error)
        click.echo(f"error: {message}", err=True)
        return code
    return code if isinstance(code, int) else 0
