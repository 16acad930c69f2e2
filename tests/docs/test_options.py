"""The options in the documents equal those in the code: docs/commands.md has all, and pages by hand name no others."""

import re
import tomllib
from typing import Final

import click

from tk.cli.main import COMMANDS
from tk.scripts import command_page
from tk.tests.docs.blocks import PAGES, ROOT
from tk.tests.docs.test_pages import check_override
from tk.train.config.train_config import TrainConfig

OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
SECTIONS: Final = "|".join(TrainConfig.model_fields)
FOREIGN: Final = frozenset(
    {
        *("--help", "--version"),
        *("--index-url", "--extra-index-url", "--no-index", "--find-links", "--wheel-dir"),  # pip
        *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),  # torchrun
        *("--shutdown-timeout", "--signals-to-handle"),
        *("--signal", "--requeue", "--ntasks-per-node"),  # sbatch
        *("--cpus", "--shm-size", "--stop-timeout"),  # docker
        "--local-dir",  # hf
        *("--cert", "--key", "--from-file"),  # kubectl
        *("--timeout", "--fix"),  # pytest, ruff
        *("--tool", "--cache-sim", "--no-show-raw-insn"),  # valgrind, objdump
    }
)


def own_options(command: click.Command) -> set[str]:
    """Returns the options of a command and of the commands inside it."""
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return {option for param in command.params for option in param.opts}.union(*map(own_options, inner))


def options_of_benchmarks() -> set[str]:
    """Returns the options of scripts that measure, which the pages of their results name."""
    scripts = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*.py")]
    return {
        name for path in scripts for text in re.findall(r'"(--[a-z/-]+)"', path.read_text()) for name in text.split("/")
    }


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    assert command_page.PAGE.read_text() == command_page.page(), "run `make map`"
    assert len(re.findall(r"^\| `-", command_page.page(), re.MULTILINE)) > 150


def test_extras_that_options_need_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"[Ee]xtra `?(\w+)", command_page.page())
    assert named
    assert set(named) <= extras.keys()


def test_pages_name_no_option_that_no_command_has() -> None:
    ours = {"--debug"}.union(*(own_options(entry.load()) for entry in COMMANDS.values()))
    assert not FOREIGN & ours
    known = FOREIGN | ours
    of_benchmarks = options_of_benchmarks()
    wrong = {
        page: found
        for page in PAGES
        if (
            found := set(OPTION.findall((ROOT / page).read_text()))
            - known
            - (of_benchmarks if "benchmarks" in page else set())
        )
    }
    assert wrong == {}


def test_every_foreign_option_is_still_named() -> None:
    named = {option for page in PAGES for option in OPTION.findall((ROOT / page).read_text())}
    assert named >= FOREIGN


def test_pages_name_no_configuration_key_that_does_not_exist() -> None:
    """A key stands in code as `section.key`, with or without a value, or as `[section] key`."""
    named = re.compile(rf"`(?:\[({SECTIONS})\] |(?:--set )?({SECTIONS})\.)(?!safetensors|jsonl)([a-z_]+)(?=[`. =])")
    keys = {(a or b, key) for page in PAGES for a, b, key in named.findall((ROOT / page).read_text())}
    assert len(keys) > 80
    for section, key in sorted(keys):
        check_override(f"{section}.{key}=0")
