"""Public names that load when first used: of a package made here, and of the rooms that have such names."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tk

PACKAGE = """
from tk.core.public_names import public_names

__all__, __getattr__, __dir__ = public_names(__name__, {"Dear": ".costly", "Cheap": ".light"})
"""
USE = """
import sys, rooms
assert dir(rooms) == ["Cheap", "Dear"]
assert not {"rooms.costly", "rooms.light"} & set(sys.modules)
assert rooms.Cheap == 1
assert "rooms.costly" not in sys.modules
from rooms import *
assert (Cheap, Dear) == (1, 2)
try:
    rooms.Cheep
except AttributeError as error:
    print(error)
"""
ROOMS = ("", "checkpoint", "infer", "train")


def test_a_module_is_loaded_when_its_name_is_used(tmp_path: Path) -> None:
    (tmp_path / "rooms").mkdir()
    for name, text in (("__init__", PACKAGE), ("light", "Cheap = 1"), ("costly", "Dear = 2")):
        (tmp_path / "rooms" / f"{name}.py").write_text(text)
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "module 'rooms' has no attribute 'Cheep'\n"), done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_type_checker_sees_the_names_of_a_room(room: str) -> None:
    """The imports under TYPE_CHECKING have the same names and modules as those that are loaded at run time."""
    tree = ast.parse((Path(tk.__file__).parent / room / "__init__.py").read_text())
    [switch] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: f".{each.module}"
        for each in switch.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
        if alias.asname == alias.name
    }
    [loaded] = [node for node in switch.orelse if isinstance(node, ast.Assign)]
    assert isinstance(loaded.value, ast.Call)
    assert ast.literal_eval(loaded.value.args[1]) == seen
    package = import_module(f"tk.{room}".rstrip("."))
    assert sorted(seen) == dir(package) == package.__all__
    assert all(hasattr(package, name) for name in seen)
