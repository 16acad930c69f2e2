"""What one run of `tk` says: the options that `tk` and all its commands accept, the log, and the error at the end."""

import logging
import os
import shlex
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

_LOG: Final = logging.getLogger("tk.cli")


@dataclass
class Invocation:
    """The state of one run of `tk`.

    Attributes:
        debug: whether errors print a traceback.
        quiet: whether results, warnings and errors alone are printed.
        verbose: whether details are printed too.
        log_format: "text" or "json".
        is_shown: whether this run has shown its log.
    """

    debug: bool = False
    quiet: bool = False
    verbose: bool = False
    log_format: str = "text"
    is_shown: bool = False

    def show_log(self) -> None:
        """Shows the log of this process as the options ask.

        Raises:
            UsageError: they contradict each other.
        """
        from ..core.console_log import show_log

        if self.quiet and self.verbose:
            raise click.UsageError("--quiet and --verbose contradict each other: pass one of them.")
        self.is_shown = True
        words = ("quiet" if self.quiet else "", "verbose" if self.verbose else "", self.log_format)
        show_log(" ".join(filter(None, words)))

    def fail(self, message: str, error: Exception) -> None:
        """Prints the error that ends the command, in the form of the log."""
        if not self.is_shown:  # an error in the words before the command
            self.verbose = self.verbose and not self.quiet
            self.show_log()
        if self.debug and self.log_format == "text":
            traceback.print_exception(error)
        _LOG.error("%s", _encodable(message), exc_info=error if self.debug and self.log_format == "json" else None)


def say(text: str) -> None:
    """Prints a line about the work of a command on standard error, in the form of the log, unless it is quiet."""
    _LOG.info("%s", _encodable(text))


def note(text: str) -> None:
    """Prints a remark on the result of a command, as `say` does."""
    say(f"note: {text}")


def say_error(text: str) -> None:
    """Prints an error that a command found and that does not end it, in the form of the log."""
    _LOG.error("%s", _encodable(text))


def _encodable(text: str) -> str:
    """Returns a text that every handler of the log can write: the name of a file need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def suggest(*commands: str) -> None:
    """Prints the commands that probably come next, as `say` does; not within another command of tk."""
    from ..core.process import PARENT_VARIABLE

    if PARENT_VARIABLE not in os.environ:
        say("\n  ".join(["Next:", *commands]))


def commands_for(checkpoint: Path, folder: Path) -> list[str]:
    """Returns commands that use a checkpoint.

    Args:
        checkpoint: the path to name.
        folder: the folder of its files; without a tokenizer, there is no prompt of text.
    """
    path, has_text = shlex.quote(str(checkpoint)), (folder / "tokenizer.json").exists()
    return [*([f"tk generate {path} 'Once upon a time'"] if has_text else []), f"tk serve {path}"]


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    invocation = ctx.find_object(Invocation)
    if not value or invocation is None or param.name is None:
        return
    setattr(invocation, param.name, value)
    if ctx.parent is not None:  # else `tk` shows the log once all of its own options are read
        invocation.show_log()


def _shared_options() -> Iterator[click.Option]:
    flags = (
        (("--debug",), "Print a traceback on errors."),
        (("-q", "--quiet"), "Print results, warnings and errors alone."),
        (("-v", "--verbose"), "Print details too, with the time and the module that says them."),
    )
    for names, text in flags:
        yield click.Option(names, is_flag=True, expose_value=False, is_eager=True, callback=_keep, help=text)
    yield click.Option(
        ["--log-format"],
        type=click.Choice(["text", "json"]),
        expose_value=False,
        is_eager=True,
        callback=_keep,
        help="Form of all lines on standard error; json: an object per line. Default: text.",
    )


def accept_shared_options(command: click.Command) -> None:
    """Adds the options of every command to a command and to the commands inside it, once."""
    if any(param.name == "debug" for param in command.params):
        return
    command.params += _shared_options()
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            accept_shared_options(inner)
