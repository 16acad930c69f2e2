"""The longest row with which a run fits into the memory of its ranks (no torch)."""

from typing import Final

from .fit import MemoryLimit, excess
from .machines import Machines
from .planned_run import PlannedRun

_STEP: Final = 256  # tokens; lengths between are not tried


def longest_row(run: PlannedRun, limit: MemoryLimit, machines: Machines) -> int:
    """Returns the largest multiple of 256 tokens that fits, at most the model's context; 0 if not even 256 do.

    Args:
        run: the run, of which only the length of rows changes.
        limit: the memory of the machines.
        machines: how many they are.
    """
    fits, too_long = 0, run.model.max_position_embeddings // _STEP + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if any(excess(run.with_rows_of(middle * _STEP), limit, machines)):
            too_long = middle
        else:
            fits = middle
    return fits * _STEP
