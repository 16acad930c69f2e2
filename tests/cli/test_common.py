"""Sizes and JSON, as all commands read and show them."""

import json
import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tk.cli.common import ByteSize, PathType, parse_bytes, print_json
from tk.cli.main import COMMANDS, main
from tk.core.errors import ConfigError
from tk.core.progress import format_bytes


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


@given(st.integers(0, 1 << 60))
def test_a_written_size_reads_back_within_its_digits(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.0051)


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


TEXTS = frozenset(  # arguments and options of plain text that are no paths
    {
        "data prepare --ignore",
        "eval --ignore",
        "tokenizer train --ignore",
        "train --set",
        "plan --set",
        "examples name",
        "generate prompt",
        "init name",
        "generate --regex",
        "serve --cors-origin",
        "serve --host",
        "serve --metrics-host",
        "serve --served-model-name",
        "serve --otlp-endpoint",
        "top address",
        "bench serve address",
        "token principal",
        "token --adapter",
    }
)


def parameters(name: str, command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
    """Yields the parameters of a command and of the commands inside it, by names like "train --resume"."""
    for parameter in command.params:
        yield f"{name} {parameter.opts[-1]}", parameter
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from parameters(f"{name} {inner.name}", inner)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_path_of_a_command_refuses_an_empty_text(name: str) -> None:
    command = COMMANDS[name].load()
    for words, parameter in parameters(name, command):
        assert isinstance(parameter.type, PathType) == isinstance(parameter.type, click.Path), words
        if isinstance(parameter.type, PathType):
            with pytest.raises(click.BadParameter, match="The path is empty"):
                parameter.type.convert("", parameter, None)
        elif isinstance(parameter.type, click.types.StringParamType):
            assert words in TEXTS, f"{words} takes any text: is it a path?"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_has_a_name_that_speaks(name: str) -> None:
    command = COMMANDS[name].load()
    context = click.Context(command)
    for words, parameter in parameters(name, command):
        if isinstance(parameter, click.Option) and parameter.is_flag:
            continue
        shown = parameter.make_metavar(context)
        dumb = re.search(r"\b(INTEGER|FLOAT|TEXT|PATH|DIR|DIRECTORY|FILENAME|BOOLEAN|RANGE)\b", shown)
        assert dumb is None, f"{words} {shown}: use SIZE, N, FOLDER, FILE, HOST:PORT, CKPT or another word that speaks"


@pytest.mark.parametrize(
    ("words", "parameter"),
    [
        (("train", "config.toml", "--resume", ""), "--resume"),
        (("verify", ""), "CKPT"),
        (("reshard", "here", ""), "DST"),
        (("generate", "", "prompt"), "CKPT|HOST:PORT"),
        (("data", "prepare", "text", "", "--tokenizer", "t", "--out", "o"), "INPUT..."),
        (("token", "me", "--tokens", ""), "--tokens"),
        (("serve", "here", "--tls-key", ""), "--tls-key"),
    ],
)
def test_an_empty_path_is_wrong_usage(
    words: tuple[str, ...], parameter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"Invalid value for '{parameter}': The path is empty" in error
