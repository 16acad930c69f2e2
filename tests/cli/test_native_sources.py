"""The native libraries of the house, whole: a start compiles only the units that its CPU can run."""

import platform
from pathlib import Path

import pytest

from tk.cli.native_sources import native_sources
from tk.core.native import NativeSource
from tk.core.native.build import build_library
from tk.tests.core.native.sources import quiet


@pytest.mark.matrix
@pytest.mark.parametrize("source", native_sources(), ids=lambda source: source.name)
def test_every_unit_for_this_machine_compiles(source: NativeSource, tmp_path: Path) -> None:
    machine = platform.machine()
    built = build_library(source, machine, tmp_path, quiet)
    assert built.units == tuple(unit.name for unit in source.units_for(machine))
