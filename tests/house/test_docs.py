"""The documents against the code: configuration keys, options, links and examples."""

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from tk.cli.invocation import accept_shared_options
from tk.cli.main import COMMANDS, command_group
from tk.core.config import Section
from tk.infer.engine.request.sampling_params import OPTIONS, SamplingParams
from tk.tests.house.conftest import ROOMS
from tk.train.config.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))


def test_every_configuration_key_is_documented_with_its_default(root: Path) -> None:
    text = (root / "docs" / "training" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+\.[a-z0-9_]+)` \| ([^|]*) \|", text, re.MULTILINE))
    keys = {
        f"{section}.{key}": value.default
        for section, field in TrainConfig.model_fields.items()
        for schema in (field.annotation, *get_args(field.annotation))
        if isinstance(schema, type) and issubclass(schema, Section)
        for key, value in schema.model_fields.items()
    }
    assert set(rows) == set(keys)
    for key, default in keys.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert float(rows[key].strip(" `")) == default, key


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(root: Path, document: str) -> None:
    path = root / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_pages_that_code_names_exist(root: Path, sources: list[Path]) -> None:
    named = {(path, page) for path in sources for page in re.findall(r"docs/[\w/-]+\.md", (root / path).read_text())}
    assert named
    assert not [f"{path}: {page}" for path, page in sorted(named) if not (root / page).exists()]


def test_options_in_the_documents_exist(root: Path) -> None:
    for document in DOCUMENTS:
        for line in (root / document).read_text().splitlines():
            for command, rest in re.findall(r"\btk ([a-z]+) ([^`#\n]*)", line):
                if command in COMMANDS:
                    _check_options(command, rest, f"{document}: {line}")


def _check_options(command: str, words: str, where: str) -> None:
    loaded = COMMANDS[command].load()
    accept_shared_options(loaded)
    if isinstance(loaded, click.Group):
        loaded = loaded.commands[words.split()[0]]
    known = {option for param in loaded.params for option in param.opts}
    for option in re.findall(r"--[a-z-]+", words):
        assert option in known, f"{where}: {option}"


def test_every_command_has_help_with_an_example() -> None:
    for command in (command_group(), *(entry.load() for entry in COMMANDS.values())):
        for each in (command, *(command.commands.values() if isinstance(command, click.Group) else ())):
            shown = CliRunner().invoke(each, ["--help"]).output
            assert re.search(r"Examples?:\s+tk ", shown), each.name


@pytest.mark.parametrize("page", ["trails.md", "request.md"])
def test_functions_that_the_trails_name_exist(root: Path, page: str) -> None:
    named = re.findall(r"`([a-z_/]+\.py)`\s+`([A-Za-z_.]+)`", (root / "docs" / page).read_text())
    assert len(named) > 15
    missing = [f"{path}: {name}" for path, name in named if name not in _defined(root / path)]
    assert missing == []


def _defined(path: Path) -> set[str]:
    """Returns the functions and methods of a module, as `function` and `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, FUNCTIONS):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS)}
    return names


def test_files_that_pages_name_exist(root: Path) -> None:
    rooms = "|".join((*ROOMS, "tests", "benchmarks", "docs", "examples", "scripts"))  # users' folders are not ours
    named = {
        (page, path)
        for page in DOCUMENTS
        if not page.startswith("docs/benchmarks/") and page != "CHANGELOG.md"
        for path in re.findall(rf"`((?:{rooms})/[\w./-]*)`", (root / page).read_text())
    }
    assert len(named) > 100
    assert [f"{page}: {path}" for page, path in sorted(named) if not (root / path).exists()] == []


def option_rows() -> list[str]:
    """Returns the table of sampling options: field of the wire, default, values and meaning."""
    defaults, text = SamplingParams(), inspect.cleandoc(SamplingParams.__doc__ or "")
    meanings = dict(re.findall(r"^    (\w+): (.*)$", text, re.MULTILINE))
    rows = []
    for name, option in OPTIONS.items():
        default = getattr(defaults, name)
        shown = "" if default in (None, (), {}) else f"{default:g}" if default is not False else "false"
        allowed = "" if option.allowed is None else option.allowed.words
        rows.append(f"| `{option.part}.{name}` | {shown} | {allowed} | {meanings[name]} |")
    return rows


def test_every_sampling_option_is_documented_as_its_table_has_it(root: Path) -> None:
    page = (root / "docs" / "wire.md").read_text()
    assert re.findall(r"^\| `(?:sampling|stopping|output)\..*$", page, re.MULTILINE) == option_rows()


def paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a page and the items of its lists, without tables, headings and blocks of code."""
    text = re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*\|.*$|^#.*$", "", text, flags=re.MULTILINE)
    return [part.strip() for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text) if part.strip()]


def test_no_paragraph_is_long(root: Path) -> None:
    pages = [page for page in DOCUMENTS if page.startswith("docs/") and not page.startswith("docs/benchmarks/")]
    long = [
        f"{page}: {len(words)} words: {' '.join(words[:8])}"
        for page in pages
        for words in map(str.split, paragraphs((root / page).read_text()))
        if len(words) >= 240
    ]
    assert long == []


def test_paragraphs_are_without_tables_headings_and_code() -> None:
    text = "# Head\nOne\ntwo.\n- three\n  four\n- five\n| a | b |\n```\ncode\n\nmore\n```\n1. six\n\nseven"
    assert paragraphs(text) == ["One\ntwo.", "- three\n  four", "- five", "1. six", "seven"]


def test_nothing_cites_a_page_outside_of_the_repository(root: Path) -> None:
    outside = re.compile(r"\b(WIRE|FORMAT)\.md\b|\bDESIGN\b")
    folders = {path.relative_to(root).parts[0] for path in root.glob("*/") if not path.name.startswith(".")}
    pages = [*root.glob("*.*"), *(path for folder in sorted(folders) for path in (root / folder).rglob("*.*"))]
    read = [
        path for path in pages if path.suffix in {".py", ".md", ".toml", ".proto"} and path != Path(__file__).resolve()
    ]
    assert len(read) > 400
    assert [str(path.relative_to(root)) for path in read if outside.search(path.read_text())] == []
