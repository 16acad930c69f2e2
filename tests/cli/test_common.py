"""Sizes, durations, JSON and progress, as all commands show them."""

import io
import json

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tk.cli.common import ByteSize, parse_bytes, print_json
from tk.core.errors import ConfigError
from tk.core.progress import PlainProgress, format_bytes, format_seconds, progress_bar


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("10B", 10),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5G", 3 << 29),
        ("64k", 64 << 10),
        ("10MB", 10_000_000),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 X", "1e9", "2GiB free"])
def test_other_text_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="2GiB or 10MB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (999 << 20, "999 MiB"), (5 << 40, "5 TiB")],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 1 << 60))
def test_a_written_size_reads_back_within_its_digits(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.0051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (3.21, "3.2 s"), (59.97, "1 min 00 s"), (75, "1 min 15 s"), (7260, "2 h 01 min")],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_an_option_takes_a_size() -> None:
    @click.command()
    @click.option("--kv-memory", type=ByteSize(), default="1MiB")
    def command(kv_memory: int) -> None:
        click.echo(kv_memory)

    runner = CliRunner()
    assert runner.invoke(command).output == f"{1 << 20}\n"
    assert runner.invoke(command, ["--kv-memory", "2k"]).output == "2048\n"
    wrong = runner.invoke(command, ["--kv-memory", "lots"])
    assert wrong.exit_code == 2
    assert "'--kv-memory'" in wrong.output


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"step": 3, "loss": None})
    assert json.loads(capsys.readouterr().out) == {"step": 3, "loss": None}
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": float("nan")})


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_progress_prints_now_and_then_and_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = PlainProgress("train", 100, done=20, stream=stream, clock=clock, interval=5.0)
    for _ in range(40):
        clock.now += 1.0
        progress.advance(2, status="loss 3.1")
    progress.finish()
    lines = stream.getvalue().splitlines()
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
