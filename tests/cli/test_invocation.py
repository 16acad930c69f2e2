"""What every command says on standard error: one prefix, three amounts, and two forms."""

import json
import logging
import re

import click
import pytest

from tk.cli.invocation import note, say, say_error, suggest
from tk.cli.main import COMMANDS, CommandEntry, command_group, main
from tk.core.errors import ConfigError
from tk.core.process import PARENT_VARIABLE
from tk.core.progress import progress_bar

LOG = logging.getLogger("tk.train.saving.resume")


@click.command()
@click.argument("fault", required=False)
def speak(fault: str | None) -> None:
    """Say something of every kind."""
    say("kernels  native")
    note("3 rows are empty")
    LOG.debug("a detail")
    LOG.info("resuming")
    LOG.warning("a step is damaged")
    with progress_bar("copy", 2) as bar:
        bar.advance(2)
    click.echo("the result")
    say_error("tensor a is damaged")
    suggest("tk verify a", "tk serve a")
    if fault:
        raise ConfigError("steps must be positive")


@click.group()
def box() -> None:
    """Hold the command."""


box.add_command(speak)
TABLE = {
    "speak": CommandEntry(f"{__name__}:speak", "Say something of every kind."),
    "box": CommandEntry(f"{__name__}:box", "Hold the command."),
}
LOUD = ["warning: a step is damaged", "error: tensor a is damaged"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, list[str]]:
    code = main(words, command_group(TABLE))
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


def test_errors_and_warnings_have_one_prefix_each(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, lines = run(capsys, "speak", "config")
    assert (code, out) == (2, "the result\n")
    assert lines == [
        *("kernels  native", "note: 3 rows are empty", "resuming", "warning: a step is damaged"),
        *("copy: 2 of 2, took " + lines[4].removeprefix("copy: 2 of 2, took "), "error: tensor a is damaged"),
        *("Next:", "  tk verify a", "  tk serve a", "error: steps must be positive"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("speek",), "No such command 'speek'. Did you mean 'speak'?"),
        (("speak", "--lout"), "--lout"),
        (("box", "speak", "a", "b"), "b"),
        (("speak", "--log-format", "yaml"), "'yaml' is not one of"),
        (("-q", "speak", "-v"), "--quiet and --verbose contradict each other"),
        (("-qv",), "Missing command"),
    ],
)
def test_wrong_usage_is_an_error_like_any_other(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, lines = run(capsys, *words)
    assert (code, out) == (2, "")
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert re.fullmatch(r"Usage: tk .*", lines[1])
    assert re.fullmatch(r"`tk.* --help` says more\.", lines[2])


@pytest.mark.parametrize(
    "words", [("-q", "speak"), ("speak", "--quiet"), ("box", "-q", "speak"), ("box", "speak", "-q")]
)
def test_quiet_leaves_results_warnings_and_errors(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *words) == (0, "the result\n", LOUD)
    assert len(run(capsys, "speak")[2]) == 9, "the next command is not quiet"


@pytest.mark.parametrize("words", [("-v", "speak"), ("box", "speak", "--verbose")])
def test_verbose_adds_details_with_time_and_module(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, lines = run(capsys, *words)
    assert (code, out) == (0, "the result\n")
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} tk\.[\w.]+: |  tk", line) for line in lines)
    assert lines[2].endswith(" tk.train.saving.resume: a detail")
    assert lines[4].endswith(" tk.train.saving.resume: warning: a step is damaged")


@pytest.mark.parametrize("words", [("--log-format", "json", "speak"), ("speak", "--log-format", "json")])
def test_all_lines_on_standard_error_are_json_where_asked(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, lines = run(capsys, *words, "config")
    assert (code, out) == (2, "the result\n")
    parsed = [json.loads(line) for line in lines]
    assert [(line["level"], line["message"]) for line in parsed[-2:]] == [
        ("info", "Next:\n  tk verify a\n  tk serve a"),
        ("error", "steps must be positive"),
    ]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in parsed)
    code, _, lines = run(capsys, "--log-format", "json", "speak", "--nothing")
    assert "--nothing" in json.loads(lines[0])["message"]


def test_debug_keeps_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, lines = run(capsys, "speak", "config", "--log-format", "json", "--debug")
    assert "Traceback (most recent call last)" in json.loads(lines[-1])["traceback"]


@pytest.mark.parametrize("columns", [80, 100, 170])
def test_help_is_as_wide_as_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (("serve",), ("data", "prepare")):
        assert main([*words, "--help"]) == 0
        assert columns - 30 < max(map(len, capsys.readouterr().out.splitlines())) <= columns


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_accepts_what_all_accept(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    for words in ("--debug", "-q, --quiet", "-v, --verbose", "--log-format [text|json]"):
        assert words in shown


def test_a_command_within_another_leaves_what_comes_next_to_that_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tk.cli")
    suggest("tk verify a")
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    suggest("tk verify b")
    assert caplog.messages == ["Next:\n  tk verify a"]


def test_names_that_are_no_text_are_written_with_backslashes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tk.cli")
    say("wrote \udcff")
    say_error("no \udcff")
    assert caplog.messages == ["wrote \\udcff", "no \\udcff"]
