"""Comparison of the values of two stored tensors, tile after tile."""

from typing import Final

import numpy as np

from ...core import dtypes
from ...core.casts import Array, widen
from ...core.dtypes import FP32, DType
from ..format.manifest import StoredTensor
from ..read.reader import Checkpoint
from .copy import TileReader
from .plan import Selection, SlotCopy, slot_tiles

TILE: Final = 2**20  # elements


def equal_tensors(checkpoint: Checkpoint, one: str, two: str) -> bool:
    """Returns whether two weights of a checkpoint have equal values (0 equals -0); stops at the first difference."""
    first, second = (checkpoint.tensors[name] for name in (one, two))
    dtype, _ = common_dtype(first, second, "weight")
    if first.shape != second.shape or dtype is None:
        return False
    with TileReader(checkpoint) as read_one, TileReader(checkpoint) as read_two:
        copies = (slot_copy(checkpoint, name, "weight", dtype) for name in (one, two))
        tiles = zip(*(slot_tiles(copy, TILE) for copy in copies), strict=True)
        return all(compare_values(read_one.load(a), read_two.load(b), dtype)[1] == 0 for a, b in tiles)


def common_dtype(a: StoredTensor, b: StoredTensor, slot: str) -> tuple[DType | None, str]:
    """Returns the dtype in which to compare a slot; None and the reason if there is none."""
    one, two = (dtypes.by_code(tensor.slots[slot]) for tensor in (a, b))
    if one == two:
        return one, ""
    if one in dtypes.COMPUTE_DTYPES and two in dtypes.COMPUTE_DTYPES:
        return FP32, ""
    return None, f"{one.code} and {two.code} are not compared"


def slot_copy(checkpoint: Checkpoint, name: str, slot: str, dtype: DType) -> SlotCopy:
    """Returns the copy, to no target, whose tiles are a slot's values in a dtype."""
    stored_name, stored_slot, stored = checkpoint.resolve(name, slot, dtype)
    selection = Selection(name, slot, stored_slot, stored, dtype)
    return SlotCopy(selection, checkpoint.tensors[name].shape, checkpoint.chunks[stored_name, stored_slot], ())


def compare_values(one: Array, two: Array, dtype: DType) -> tuple[int, float]:
    """Returns how many elements differ in their bits, and the largest difference: infinite if only one value is NaN."""
    bits = np.dtype(f"u{dtype.itemsize}")
    (where,) = np.nonzero(one.view(bits) != two.view(bits))
    if not len(where):
        return 0, 0.0
    wide = [widen(values[where], dtype) for values in (one, two)]
    with np.errstate(invalid="ignore"):
        differences = np.abs(wide[0] - wide[1])
    nan_in_both = np.isnan(wide[0]) & np.isnan(wide[1])
    differences[nan_in_both | (wide[0] == wide[1])] = 0.0
    return len(where), float(np.nan_to_num(differences, nan=np.inf, posinf=np.inf).max())
