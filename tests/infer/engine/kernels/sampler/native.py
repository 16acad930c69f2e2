"""The samplers in C that this machine can run, by the name of their unit."""

import platform
from functools import cache

from tk.core.cpu import read_cpu
from tk.core.native import load_library
from tk.infer.engine.kernels.sampler.native_sampler import SOURCE, NativeSampler


def able_units() -> list[str]:
    """Returns the units that this CPU can run, the base first."""
    able = ("base", *read_cpu().instruction_sets)
    return [unit.name for unit in SOURCE.units_for(platform.machine()) if unit.name in able]


@cache
def native_samplers() -> dict[str, NativeSampler]:
    loaded = load_library(SOURCE)
    assert loaded is not None, "tests need a C compiler"
    assert not loaded.omitted
    return {unit: NativeSampler(loaded.library, unit) for unit in able_units()}
