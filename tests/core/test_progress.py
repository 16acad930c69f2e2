"""Progress on a terminal and elsewhere; sizes and durations in words."""

import io
import json
import sys

import pytest

from tk.core.console_log import show_log
from tk.core.progress import PlainProgress, format_bytes, format_count, format_seconds, progress_bar
from tk.tests.clock import Clock


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (999 << 20, "999 MiB"), (5 << 40, "5 TiB")],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (3.21, "3.2 s"), (59.97, "1 min 00 s"), (75, "1 min 15 s"), (7260, "2 h 01 min")],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 files"), (1, "1 file"), (1200, "1,200 files")])
def test_counts_are_written(number: int, text: str) -> None:
    assert format_count(number, "file") == text


def test_plain_progress_prints_now_and_then_and_at_the_end() -> None:
    clock, lines = Clock(0.0), list[str]()
    progress = PlainProgress("train", 100, done=20, say=lines.append, clock=clock, interval=5.0)
    for _ in range(40):
        clock.now += 1.0
        progress.advance(2, status="loss 3.1")
    progress.finish()
    assert len(lines) == 8
    assert lines[0] == "train: 30 of 100, loss 3.1, 35.0 s left"
    assert lines[-1] == "train: 100 of 100, loss 3.1, took 40.0 s"


def test_quick_work_prints_one_line() -> None:
    stream = io.StringIO()
    with progress_bar("copy", 2 << 20, show=format_bytes, stream=stream) as progress:
        progress.advance(1 << 20)
        progress.advance(1 << 20)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("copy: 2 MiB of 2 MiB, took ")


def test_work_that_fails_claims_no_end() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), progress_bar("copy", 2, stream=stream) as progress:  # noqa: PT012
        progress.advance()
        raise RuntimeError
    assert stream.getvalue() == ""


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with progress_bar("train", 10, done=4, stream=stream) as progress:
        progress.advance(6, status="loss 2.5")
    shown = stream.getvalue()
    assert "train" in shown
    assert "10/10" in shown
    assert "loss 2.5" in shown


@pytest.mark.parametrize(("form", "shown"), [("quiet text", ""), ("json", "copy: 2 of 2, took")])
def test_a_terminal_gets_no_bar_beside_a_log_that_is_quiet_or_json(
    form: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    show_log(form)
    with progress_bar("copy", 2) as progress:
        progress.advance(2)
    show_log()
    lines = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert [line[: len(shown)] for line in lines] == ([shown] if shown else [])
