"""The library of kernels: one unit for each instruction set, and functions that may be called on this machine."""

import platform
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from tk.core.cpu import read_cpu
from tk.core.native import load_library
from tk.infer.engine.kernels.native.binding.library import (
    BF16_SETS,
    INSTRUCTION_SETS,
    SOURCE,
    instruction_sets,
    load_kernels,
)

needs_compiler = pytest.mark.skipif(not instruction_sets(), reason="no compiler")


def test_each_instruction_set_is_a_unit_with_a_name_of_its_own() -> None:
    named = {flag.removeprefix("-DTK_NAME="): unit for unit in SOURCE.units for flag in unit.flags if "TK_NAME" in flag}
    assert tuple(named) == INSTRUCTION_SETS
    assert {name: unit.name for name, unit in named.items()} == {name: name for name in INSTRUCTION_SETS}
    assert len({unit.source for unit in named.values()}) == 1
    assert not any(flag.startswith("-m") for flag in named["baseline"].flags), "the base runs on every machine"
    flags = [set(named[name].flags) - {f"-DTK_NAME={name}"} for name in ("avx2", "avx512", *BF16_SETS)]
    machine = [{flag for flag in each if flag.startswith("-m")} for each in flags]
    assert all(narrow < wide for narrow, wide in pairwise(machine)), "each adds instructions"


def test_every_unit_but_the_base_is_for_x86() -> None:
    plain = [unit.name for unit in SOURCE.units_for("riscv64")]
    assert plain == ["baseline", "threads", "pack"]
    assert all(path.exists() for path in (*SOURCE.headers, *(unit.source for unit in SOURCE.units)))


@needs_compiler
def test_this_machine_runs_the_sets_that_its_cpu_has() -> None:
    found = instruction_sets()
    assert found[0] == "baseline"
    assert [name for name in INSTRUCTION_SETS if name in found] == list(found), "from the plainest to the fastest"
    assert set(found) <= {"baseline", *read_cpu().instruction_sets}
    if platform.machine() != "x86_64":
        assert found == ("baseline",)


@needs_compiler
@pytest.mark.parametrize("name", instruction_sets())
def test_functions_of_a_set_are_its_own(name: str) -> None:
    kernels = load_kernels(name)
    assert kernels is not None
    assert kernels.instruction_set == name
    assert kernels.column_step == {"avx512_bf16": 2, "amx": 32}.get(name, 0)
    assert kernels.refusal() == b"" or name == "amx"
    functions = [getattr(kernels, field.name) for field in fields(kernels)[3:]]
    assert all(callable(function) and function.argtypes is not None for function in functions)


@needs_compiler
def test_a_set_that_is_not_in_the_library_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels("avx10") is None
    monkeypatch.setattr("tk.infer.engine.kernels.native.binding.library.load_library", lambda source: None)
    assert load_kernels("baseline") is None
    assert instruction_sets() == ()


@needs_compiler
def test_a_unit_that_was_left_out_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_library(SOURCE)
    assert loaded is not None
    monkeypatch.setattr(
        "tk.infer.engine.kernels.native.binding.library.load_library",
        lambda source: replace(loaded, units=("baseline",)),
    )
    assert instruction_sets() == ("baseline",)
    assert load_kernels("avx2") is None
