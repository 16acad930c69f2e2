"""The progress of long work, as a bar on a terminal and as plain lines elsewhere; sizes and durations as text."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol, TextIO

from .console_log import shown_form

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
PLAIN_INTERVAL_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)


def format_bytes(num_bytes: int | float) -> str:
    """Formats a size in binary units with three significant digits: 1536 -> "1.5 KiB"."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1023.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or abs(size) >= 99.5 else f"{size:.3g} {_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Formats a duration: 0.0123 -> "12.3 ms", 3.21 -> "3.2 s", 75 -> "1 min 15 s", 7260 -> "2 h 01 min"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(number: int, noun: str) -> str:
    """Formats a number of things: (1, "file") -> "1 file", (1200, "file") -> "1,200 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Progress(Protocol):
    """The progress display of work with a known number of units."""

    def advance(self, amount: int = 1, status: str = "") -> None:
        """Counts `amount` more units as done and shows `status` ("loss 3.21, lr 1e-3") beside them."""


@contextmanager
def progress_bar(
    description: str, total: int, *, done: int = 0, show: Callable[[int], str] = str, stream: TextIO | None = None
) -> Iterator[Progress]:
    """Shows long work: on a terminal as a bar with the time left, elsewhere as plain lines every few seconds.

    Where `show_log` shows the log, lines are in its form, also on a terminal if that is JSON; a quiet log has none.

    Args:
        description: the name of the work.
        total: the number of units of the whole work.
        done: the number of units done before this call.
        show: formats a number of units (`format_bytes` for bytes).
        stream: the stream to write to; None = stderr.
    """
    form = shown_form().split() if stream is None else []
    stream = stream or sys.stderr
    if stream.isatty() and not {"quiet", "json"}.intersection(form):
        with _terminal_bar(description, total, done, show, stream) as bar:
            yield bar
        return
    say = _log.info if form else partial(print, file=stream, flush=True)
    lines = PlainProgress(description, total, done=done, show=show, say=say)
    yield lines
    lines.finish()


class PlainProgress:
    """Progress as lines of text: at most one per interval, and always one at the end."""

    def __init__(
        self,
        description: str,
        total: int,
        *,
        done: int = 0,
        show: Callable[[int], str] = str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        interval: float = PLAIN_INTERVAL_SECONDS,
    ) -> None:
        self.description, self.total, self.done, self.show = description, total, done, show
        self.say, self.clock, self.interval = say, clock, interval
        self.first_done, self.start = done, clock()
        self.printed_at, self.printed_done, self.status = self.start, -1, ""

    def advance(self, amount: int = 1, status: str = "") -> None:
        """Counts `amount` more units, and prints a line if an interval has passed since the last one."""
        self.done += amount
        self.status = status or self.status
        if self.clock() - self.printed_at >= self.interval:
            self._print()

    def finish(self) -> None:
        """Prints the final progress, unless the last line shows it already."""
        if self.printed_done != self.done:
            self._print()

    def _print(self) -> None:
        self.printed_at, self.printed_done = self.clock(), self.done
        elapsed, new = self.printed_at - self.start, self.done - self.first_done
        parts = [f"{self.description}: {self.show(self.done)} of {self.show(self.total)}"]
        if self.status:
            parts.append(self.status)
        if self.done >= self.total:
            parts.append(f"took {format_seconds(elapsed)}")
        elif new > 0:
            parts.append(f"{format_seconds(elapsed / new * (self.total - self.done))} left")
        self.say(", ".join(parts))


@contextmanager
def _terminal_bar(
    description: str, total: int, done: int, show: Callable[[int], str], stream: TextIO
) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TextColumn("{task.fields[status]}", style="dim"),
        TimeRemainingColumn(),
    )

    class TerminalBar:
        """A bar of rich with the interface of `Progress`."""

        def __init__(self, bar: RichProgress) -> None:
            self.bar, self.done, self.status = bar, done, ""
            self.task: TaskID = bar.add_task(description, total=total, completed=done, amount=self.amount(), status="")

        def amount(self) -> str:
            return f"{show(self.done)}/{show(total)}"

        def advance(self, amount: int = 1, status: str = "") -> None:
            self.done += amount
            self.status = status or self.status
            self.bar.update(self.task, completed=self.done, amount=self.amount(), status=self.status)

    with RichProgress(*columns, console=Console(file=stream)) as bar:
        yield TerminalBar(bar)
