"""The plan of a step as columns of 32 bits, which travel to the device as one copy.

An adapter's number is its slot plus one; rows without an adapter have the number 0. Letters: T tokens, S spans, R rows,
W blocks of the longest table, C tiles, n rows of a bucket.
"""

from typing import Final

import numpy as np

from ......core.casts import Array
from ......core.integers import ceil_div
from ....step.running_plan import RunningPlan
from ....step.sampling_rows import OPTION_COLUMNS, SamplingRows

TOKEN_COLUMNS: Final = ("tokens", "positions", "slots")
# All options of samplers are sent, although the device takes no penalties: a row has some 50 bytes.
ROW_COLUMNS: Final = (
    *("temperature", "seed_low", "seed_high", "sample_index", "new_number"),
    *(name for name in OPTION_COLUMNS if name != "temperature"),
)
FLOAT_COLUMNS: Final = tuple(name for name, dtype in OPTION_COLUMNS.items() if dtype == "<f4")  # of these
DECODE_COLUMNS: Final = (*TOKEN_COLUMNS, *ROW_COLUMNS, "numbers")  # of a step whose spans have one token, and one row
TILE_COLUMNS: Final = ("tile_numbers", "tile_firsts", "tile_stops")  # see `RowTiles`
TILE: Final = 16  # rows, at most, of a tile of one adapter
NOWHERE: Final = -1  # the position and the slot of padding: it stores nothing and sees nothing


def step_columns(plan: RunningPlan) -> dict[str, Array]:
    """Returns the columns of any step.

    Beside the tokens' and the rows' these are `firsts`, the first packed token of each span; `starts`, its position;
    `lengths`, each [S]; `tables` [S, W]; `wanted`, the packed token of each row [R]; those of adapters, if there are.
    """
    firsts = np.cumsum(plan.span_length, dtype=np.int32) - plan.span_length
    return {
        **_token_columns(plan),
        "firsts": firsts,
        "starts": plan.positions[firsts],
        "lengths": plan.span_length,
        "tables": plan.block_tables,
        "wanted": plan.rows.token,
        **row_columns(plan.rows),
        **adapter_columns(plan),
    }


def decode_columns(plan: RunningPlan, size: int) -> Array:
    """Returns DECODE_COLUMNS of a step of single tokens, padded to a bucket: int32 [columns, n]."""
    found = np.zeros((len(DECODE_COLUMNS), size), np.int32)
    columns = _token_columns(plan) | row_columns(plan.rows) | {"numbers": plan.adapter_of + np.int32(1)}
    for name, line in zip(DECODE_COLUMNS, found, strict=True):
        line[: len(columns[name])] = columns[name]
        if name in ("positions", "slots"):
            line[len(plan.tokens) :] = NOWHERE
    return found


def _token_columns(plan: RunningPlan) -> dict[str, Array]:
    return {"tokens": plan.tokens, "positions": plan.positions, "slots": plan.slots}


def adapter_columns(plan: RunningPlan) -> dict[str, Array]:
    """Returns `numbers` [T] and TILE_COLUMNS [C] of a plan; {} if no row has an adapter."""
    if not len(plan.adapters):
        return {}
    numbers = plan.adapter_of + np.int32(1)
    begin = np.flatnonzero(np.diff(numbers, prepend=-1))  # of runs of rows of one adapter
    stop = np.append(begin[1:], len(numbers))
    counts = ceil_div(stop - begin, TILE)
    run = np.repeat(np.arange(len(begin)), counts)
    tile_of_run = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = (numbers[begin[run]], begin[run] + tile_of_run * TILE, stop[run])
    named = zip(TILE_COLUMNS, tiles, strict=True)
    return {"numbers": numbers, **{name: each.astype(np.int32) for name, each in named}}


def row_columns(rows: SamplingRows) -> dict[str, Array]:
    """Returns ROW_COLUMNS, each of 32 bits [R]: floats and the halves of seeds as their bits."""
    halves = np.ascontiguousarray(rows.seed, "<u8").view(np.int32).reshape(-1, 2)
    options = {name: np.ascontiguousarray(getattr(rows, name), dtype) for name, dtype in OPTION_COLUMNS.items()}
    return {
        "seed_low": halves[:, 0],
        "seed_high": halves[:, 1],
        "sample_index": rows.sample_index,
        "new_number": rows.new_number,
        **{name: each.view(np.int32) for name, each in options.items()},
    }
