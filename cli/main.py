"""The program `tk`: imports a command's module, runs it, and turns errors into one paragraph and an exit code.

Commands are listed in a table and imported only when they run, so that `tk --help` is fast and loads no torch. A
command that returns exits with 0; `ctx.exit(code)` exits with another code.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import click

from .. import __version__
from ..core.errors import ConfigError, TkError
from .invocation import Invocation, accept_shared_options, say

EXIT_INTERRUPTED: Final = 130
# The error of a group without a command, in clicks that have one; older ones print the help themselves.
_NO_ARGUMENTS: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())
WIDEST_HELP: Final = 10_000  # columns: as wide as any terminal


@dataclass(frozen=True)
class CommandEntry:
    """A command that is not imported yet.

    Attributes:
        target: the click command, "module:function".
        summary: the command's line in `tk --help`.
        exits_on_signals: whether SIGTERM and SIGHUP end the command as Ctrl-C does, with its clean-up; if not, the
            command handles signals itself.
    """

    target: str
    summary: str
    exits_on_signals: bool = True

    def load(self) -> click.Command:
        """Imports the command."""
        module, function = self.target.split(":")
        command: click.Command = getattr(import_module(module), function)
        return command


COMMANDS: Final[Mapping[str, CommandEntry]] = MappingProxyType(
    {
        "demo": CommandEntry("tk.cli.demo:demo", "Train, reshard and serve a small model on this machine."),
        "examples": CommandEntry("tk.cli.examples:examples", "List the examples of tk, or copy one."),
        "init": CommandEntry("tk.cli.init:init", "Write a configuration for your text or your model."),
        "train": CommandEntry("tk.cli.train:train", "Train a model, on one rank or many.", exits_on_signals=False),
        "data": CommandEntry("tk.cli.data:data", "Turn text into token folders."),
        "tokenizer": CommandEntry(
            "tk.cli.tokenizer:tokenizer", "Train a byte-level BPE tokenizer.", exits_on_signals=False
        ),
        "plan": CommandEntry("tk.cli.plan:plan", "Show the memory, idle time and traffic of a run before it starts."),
        "plot": CommandEntry("tk.cli.plot:plot", "Draw loss, learning rate, gradient norm and speed of runs."),
        "doctor": CommandEntry("tk.cli.doctor:doctor", "Check this machine's hardware, limits and software."),
        "parity": CommandEntry("tk.cli.parity:parity", "Compare training at many layouts with one process."),
        "reshard": CommandEntry("tk.cli.reshard:reshard", "Rewrite a checkpoint for another parallel layout."),
        "export": CommandEntry("tk.cli.export:export", "Write a checkpoint as a Hugging Face folder."),
        "inspect": CommandEntry("tk.cli.inspect:inspect", "Show the step, layout, files and tensors of a checkpoint."),
        "verify": CommandEntry("tk.cli.verify:verify", "Check every byte of a checkpoint."),
        "diff": CommandEntry("tk.cli.diff:diff", "Compare the tensors of two checkpoints."),
        "serve": CommandEntry("tk.cli.serve:serve", "Serve a checkpoint over gRPC."),
        "top": CommandEntry("tk.cli.top:top", "Show the load of a running server, live."),
        "token": CommandEntry("tk.cli.token:token", "Make a token for a caller of `tk serve --tokens`."),
        "generate": CommandEntry("tk.cli.generate:generate", "Continue a prompt, from a server or a checkpoint."),
        "bench": CommandEntry("tk.cli.bench:bench", "Measure a running server under load."),
        "eval": CommandEntry("tk.cli.eval:evaluate", "Measure the perplexity of text, and how a dtype changes it."),
    }
)


class LazyGroup(click.Group):
    """A click group over a table of commands, which imports a command only to run it or to show its help."""

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
        accept_shared_options(command)
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
        _require_directory()
        ctx.ensure_object(Invocation).show_log()
        if name in self.table and self.table[name].exits_on_signals:
            from .signals import exit_on_signals

            ctx.with_resource(exit_on_signals())
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.table.items()])


def command_group(table: Mapping[str, CommandEntry] = COMMANDS) -> LazyGroup:
    """Returns the group `tk` over a table of commands."""
    version = click.version_option(__version__, prog_name="tk", message="%(prog)s %(version)s")
    group = LazyGroup(
        table,
        name="tk",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP},
        help="Train a language model over many devices, reshard its checkpoint, serve it over gRPC.",
        epilog="Example: tk demo\n\n"
        "Exit codes: 0 success, 1 failure or end by SIGTERM or SIGHUP, 2 wrong usage or configuration, 3 unusable "
        "checkpoint, 130 interrupted.",
    )
    accept_shared_options(group)
    return version(group)


def _require_directory() -> None:
    """Raises ConfigError if the current directory was removed: processes that a command starts would fail obscurely."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("The current directory was removed. Change to one that exists: cd ~") from error


def _explain(error: Exception) -> tuple[str, int]:
    """Returns the message and the exit code for an error that ended a command."""
    if isinstance(error, click.UsageError):
        return error.format_message() + _usage(error.ctx), error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, TkError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        return (f"{error.strerror}: {error.filename}" if error.filename else str(error)), 1
    return f"{type(error).__name__}: {error}\nThis is a bug in tk: run the command with --debug for a traceback.", 1


def _usage(ctx: click.Context | None) -> str:
    return f"\n{ctx.get_usage()}\n`{ctx.command_path} --help` says more." if ctx else ""


def main(args: Sequence[str] | None = None, group: click.Group | None = None) -> int:
    """Runs one command line and returns its exit code; the epilog of `tk --help` lists the codes.

    Args:
        args: the words after `tk`, or None for those of this process.
        group: the group of commands, or None for `COMMANDS`.
    """
    invocation = Invocation()
    try:
        code = (group or command_group()).main(args, prog_name="tk", standalone_mode=False, obj=invocation)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, click.ClickException) and isinstance(error, _NO_ARGUMENTS):
            error.show()  # the help
            return error.exit_code
        message, code = _explain(error)
        invocation.fail(message, error)
        return code
    return code if isinstance(code, int) else 0
