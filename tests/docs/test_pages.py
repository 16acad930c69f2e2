"""The blocks of pages, read without running them: each is of a known kind, and says what the code takes.

`test_run_pages.py` runs them. Those with a mark are only read.
"""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from tk.core.config import apply_overrides
from tk.core.config import parse as parse_configuration
from tk.core.errors import ConfigError
from tk.tests.docs.blocks import KINDS, PAGES, REASONS, ROOT, Block, all_blocks
from tk.tests.docs.shell import commands, here_documents, parse, tk_words
from tk.train.config.train_config import TrainConfig

MOST_MARKED: Final = 0.25  # of the blocks that could be run; CONTRIBUTING.md and docs/install.md have many
BLOCKS: Final = all_blocks()
RUNNABLE: Final = KINDS - {"text", "dockerfile"}


def of_kind(kind: str) -> list[Any]:
    """Returns the blocks of a kind, as parameters of a test."""
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.kind == kind]


def test_blocks_are_of_known_kinds_and_few_are_marked() -> None:
    assert {str(block): block.kind for block in BLOCKS if block.kind not in KINDS} == {}
    assert {str(block): block.mark for block in BLOCKS if block.mark not in {None, *REASONS}} == {}
    could_run = [block for block in BLOCKS if block.kind in RUNNABLE]
    assert len(could_run) > 25
    marked = [str(block) for block in could_run if block.mark]
    assert len(marked) <= MOST_MARKED * len(could_run), marked


def test_every_mark_is_read() -> None:
    """One that stands elsewhere than before a block, or is written otherwise, would mark nothing."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    marks = len(re.findall(r"^ *<!-- (?:not run|run by)", text, re.MULTILINE))
    assert marks == sum(block.mark is not None or block.run_by is not None for block in BLOCKS)


def test_a_block_that_another_test_runs_is_known_to_it() -> None:
    for block in BLOCKS:
        if block.run_by:
            assert Path(block.page).name in (ROOT / block.run_by).read_text(), block


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in BLOCKS if block.script])
def test_shell_blocks_name_what_exists(block: Block) -> None:
    written = {name for name, _ in here_documents(block.script)}
    for words in commands(block.script):
        if words[-1] not in written:
            check_command(words)
    for name, content in here_documents(block.script):
        check_configuration(name, content)


def check_command(words: list[str]) -> None:
    """Raises an error if a command names an option, key, target or file of ours that does not exist."""
    of_tk = tk_words(words)
    if of_tk is not None:
        context = parse(of_tk)
        for override in context.params.get("overrides") or ():
            check_override(override)
        for argument in of_tk:
            if argument.startswith("examples/"):
                assert (ROOT / argument).exists(), argument
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets for word in words[1:] if "=" not in word), words
    elif Path(words[0]).name.startswith("python") and words[1:]:
        module = re.sub(r"^-m tk\.", "", " ".join(words[1:3])).split()[0]
        file = ROOT / (words[1] if words[1].endswith(".py") else f"{module.replace('.', '/')}.py")
        assert file.exists() or words[1:3] == ["-m", "venv"], words


def check_override(override: str) -> None:
    """Raises an error if no configuration has the key of `section.key=value`."""
    values: dict[str, Any] = {}
    apply_overrides(values, [override])
    try:
        parse_configuration(values, TrainConfig, override)
    except ConfigError as error:
        if "unknown key" in str(error):  # others may be missing here: the file has them
            raise


def check_configuration(name: str, content: str) -> None:
    """Raises an error if a file of JSON or TOML does not read, or is a configuration that `tk train` would refuse."""
    if name.endswith(".json"):
        json.loads(content)
    elif name.endswith(".toml"):
        values = tomllib.loads(content)
        if values.keys() & {"model", "train", "data", "lora"}:
            parse_configuration(values, TrainConfig, name)


@pytest.mark.parametrize("block", [*of_kind("toml"), *of_kind("json")])
def test_configurations_are_valid(block: Block) -> None:
    check_configuration(f"block.{block.kind}", block.code)


@pytest.mark.parametrize("block", of_kind("dockerfile"))
def test_commands_of_images_are_valid(block: Block) -> None:
    for line in block.code.splitlines():
        if line.startswith("RUN "):
            check_command(line.split()[1:])


def test_python_blocks_define_the_names_that_they_use(tmp_path: Path) -> None:
    for number, block in enumerate(block for block in BLOCKS if block.kind == "python"):
        (tmp_path / f"{number}_{block.page.replace('/', '_')}_{block.line}.py").write_text(block.code)
    names = ["--isolated", "--select", "F", "--output-format", "concise"]
    done = subprocess.run(
        [Path(sys.executable).with_name("ruff"), "check", *names, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", of_kind("python"))
def test_python_blocks_import_what_tk_has(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tk":
            module = importlib.import_module(node.module or "")
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "python examples/none.py",
        "python -m tk.benchmarks.bench_none",
        "tk train examples/none.toml",
        "tk train a.toml --set train.stepz=3",
        "tk serve a --block-size 3",
        "RUN tk doctor --built here",
    ],
)
def test_a_command_that_names_what_does_not_exist_is_seen(line: str) -> None:
    with pytest.raises((AssertionError, ValueError, ConfigError)):
        check_command(line.split())


def test_a_configuration_with_an_unknown_key_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'train\.stepz'"):
        check_configuration("a.toml", 'data.sources = "stdlib"\ntrain.stepz = 3\n')
