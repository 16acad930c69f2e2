"""Typical mistakes of users, 64 and more: each message says what is wrong, where, and what would be right."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

from tk.cli.main import COMMANDS, main
from tk.infer.client import connection
from tk.tests.cli.mistakes.in_process import InProcess
from tk.tests.cli.mistakes.mistake import Mistake
from tk.tests.cli.mistakes.of_checkpoints import OF_CHECKPOINTS
from tk.tests.cli.mistakes.of_runs import OF_RUNS
from tk.tests.cli.mistakes.of_servers import OF_SERVERS
from tk.tests.cli.mistakes.of_text import OF_TEXT
from tk.tests.cli.mistakes.servers import serving
from tk.tests.cli.mistakes.world import make_world
from tk.tests.house.pages import sections
from tk.train.launch import launcher

MISTAKES = OF_TEXT | OF_RUNS | OF_CHECKPOINTS | OF_SERVERS
NUM_MISTAKES = 64
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
LONGEST = 110  # words of a message
FOUND_BY_RANKS = ("another model in the run's folder", "a new run in an old folder", "a learning rate that is too high")
WITHOUT = {"demo", "examples", "init"}  # tests/cli/test_demo.py, test_examples.py and test_init.py have theirs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all rows, which is the current one."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_world(folder)
        yield folder


def _prepare(mistake: Mistake, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the row's files and surroundings."""
    for name, content in mistake.files.items():
        path = world / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if mistake.prepare:
        mistake.prepare(world)
    for name, value in mistake.variables.items():
        monkeypatch.setenv(name, value)
    if mistake.changed:
        monkeypatch.setattr(*mistake.changed)
    if mistake.absent:
        monkeypatch.setitem(sys.modules, mistake.absent, None)
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECONDS", 0.0)  # a server that is not there stays away


@cache
def _words_of(section: str) -> list[str]:
    """Returns what a section of the page quotes of messages: its heading, and texts in quotes, in lower case."""
    heading, _, text = sections(PAGE)[section].partition("\n")
    quoted = re.findall(r'"([^"]+)"', " ".join(text.split()))
    return [heading.lstrip("# ").lower(), *map(str.lower, quoted)]


def _check(mistake: Mistake, capsys: pytest.CaptureFixture[str]) -> None:
    """Makes the mistake, and compares message and exit code with the row."""
    capsys.readouterr()
    with serving(mistake.server) if mistake.server else nullcontext("") as address:
        port = address.rpartition(":")[2]
        code = main(shlex.split(mistake.command.format(server=address, port=port)))
    shown = capsys.readouterr()
    message = " ".join((shown.err + shown.out).split())
    for part in (mistake.what, mistake.where, mistake.remedy):
        assert re.search(part, message, re.IGNORECASE), f"{part!r} is not in: {message}"
    assert code == mistake.code, message
    assert any(each in message.lower() for each in _words_of(mistake.section)), (
        "its section has no words of the message"
    )
    assert "Traceback" not in message
    assert len(shown.err.split()) <= LONGEST, "a message is one readable paragraph"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * row.processes) for name, row in MISTAKES.items()]
)
def test_a_message_says_what_is_wrong_where_and_what_would_be_right(
    name: str, world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not MISTAKES[name].processes:
        monkeypatch.setattr(launcher, "Launcher", InProcess)
    _prepare(MISTAKES[name], world, monkeypatch)
    _check(MISTAKES[name], capsys)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FOUND_BY_RANKS)
def test_what_a_rank_finds_comes_through_its_launcher(
    name: str, world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepare(MISTAKES[name], world, monkeypatch)
    _check(MISTAKES[name], capsys)


def test_every_command_has_a_mistake() -> None:
    assert len(MISTAKES) >= NUM_MISTAKES
    assert {shlex.split(each.command)[0] for each in MISTAKES.values()} >= COMMANDS.keys() - WITHOUT
