"""Rules that keep the tree readable and its formats safe, checked over every module."""

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tk.scripts import module_map
from tk.tests.house.conftest import ROOMS
from tk.tests.house.syntax import nodes

MAX_FILE_LINES = 350
MAX_TEST_FILE_LINES = 500
MAX_MODULES_OF_A_FOLDER = 12
MAX_UNTESTED_LINES = 100
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
PRINTERS = ("cli", "core/progress.py", "core/console_log.py")
PICKLING_MODULES = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
# Calls that pickle behind a harmless name: torch's own files and its collectives over Python objects.
PICKLING_CALLS = frozenset(
    {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"}
    | {"recv_object_list"}
)


def test_no_file_is_long(root: Path, sources: list[Path]) -> None:
    tests = [path.relative_to(root) for path in (root / "tests").rglob("*.py")]
    for files, most in ((sources, MAX_FILE_LINES), (tests, MAX_TEST_FILE_LINES)):
        lines = {str(path): len((root / path).read_text().splitlines()) for path in files}
        assert {path: number for path, number in lines.items() if number > most} == {}


def crowded(paths: Iterable[Path]) -> dict[str, int]:
    """Returns the folders of `infer/` with more than a dozen modules, and how many they have."""
    modules = Counter(str(path.parent) for path in paths if path.parts[0] == "infer" and path.name != "__init__.py")
    return {folder: number for folder, number in modules.items() if number > MAX_MODULES_OF_A_FOLDER}


def test_every_folder_of_infer_has_at_most_a_dozen_modules(sources: list[Path]) -> None:
    assert crowded(sources) == {}


def test_a_crowded_folder_is_seen() -> None:
    paths = [Path(f"infer/a/{number}.py") for number in range(13)]
    assert crowded([*paths, Path("infer/b.py")]) == {"infer/a": 13}


def without_tests(lines: dict[Path, int], tests: set[Path]) -> list[str]:
    """Returns the modules of more than MAX_UNTESTED_LINES lines that have no test file of their own."""
    return [
        str(path)
        for path, number in lines.items()
        if number > MAX_UNTESTED_LINES and path.with_name(f"test_{path.name}") not in tests
    ]


def test_every_module_of_some_size_has_a_test_file_of_its_own(root: Path, sources: list[Path]) -> None:
    lines = {path: len((root / path).read_text().splitlines()) for path in sources}
    tests = {path.relative_to(root / "tests") for path in (root / "tests").rglob("test_*.py")}
    assert without_tests(lines, tests) == []


def test_a_module_without_a_test_file_is_seen() -> None:
    lines = {Path("core/a.py"): 101, Path("core/b.py"): 101, Path("core/c.py"): 100}
    assert without_tests(lines, {Path("core/test_b.py"), Path("text/test_a.py")}) == ["core/a.py"]


def test_no_function_is_long(root: Path, sources: list[Path]) -> None:
    long = {
        f"{path}:{node.lineno} {node.name}": length
        for path in sources
        for node in nodes((root / path).read_text())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def many_parameters(path: Path, text: str) -> dict[str, int]:
    """Returns functions with too many parameters, but for commands, whose parameters are a user's options."""
    found = {}
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            number = len(names) - (names[:1] in (["self"], ["cls"]))
            is_command = any("click." in ast.unparse(decorator) for decorator in node.decorator_list)
            if number > MAX_PARAMETERS and not is_command:
                found[f"{path}:{node.lineno} {node.name}"] = number
    return found


def test_no_function_has_many_parameters(root: Path, sources: list[Path]) -> None:
    found: dict[str, int] = {}
    for path in sources:
        found |= many_parameters(path, (root / path).read_text())
    assert [where for where in found if not where.endswith(" initialize")] == []


def test_many_parameters_are_seen() -> None:
    names = ", ".join(f"p{number}" for number in range(MAX_PARAMETERS))
    assert many_parameters(Path("core/a.py"), f"def f(self, {names}): ...") == {}
    assert list(many_parameters(Path("core/a.py"), f"def f(self, {names}, *, q): ...").values()) == [9]
    assert many_parameters(Path("cli/a.py"), f"@click.command()\ndef f({names}, q): ...") == {}


def pickling(text: str) -> list[str]:
    """Returns the places where a module's source pickles or unpickles, as "line: name"."""
    found = []
    for node in nodes(text):
        match node:
            case ast.Import(names=names):
                found += [f"{node.lineno}: import {n.name}" for n in names if n.name.split(".")[0] in PICKLING_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLING_MODULES:
                found.append(f"{node.lineno}: from {module} import")
            case ast.Attribute(value=ast.Name(id="torch"), attr=("load" | "save") as name):
                found.append(f"{node.lineno}: torch.{name}")
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in PICKLING_CALLS:
                found.append(f"{node.lineno}: {name}")
    return found


def test_nothing_is_pickled(root: Path, sources: list[Path]) -> None:
    found = [f"{path}:{where}" for path in sources for where in pickling((root / path).read_text())]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.save({}, 'x')",
        "dist.all_gather_object(out, x)",
    ],
)
def test_pickling_is_seen(text: str) -> None:
    assert len(pickling(text)) == 1


def test_the_map_shows_every_module() -> None:
    assert module_map.PAGE.read_text() == module_map.page(), "run `make map`"
    assert set(module_map.ROOMS) == set(ROOMS)


def test_libraries_log_and_commands_print(root: Path, sources: list[Path]) -> None:
    printing = [
        f"{path}:{node.lineno}"
        for path in sources
        if not str(path).startswith(PRINTERS)
        for node in nodes((root / path).read_text())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []
