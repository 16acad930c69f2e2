"""Comparison of two checkpoints' values, at any two layouts, in memory that does not grow with the model.

Both are read like a copy's source: tile after tile of each logical tensor, strictly forward, with every byte checked.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ...core import dtypes
from ...core.casts import Array, widen
from ...core.dtypes import FP32, DType
from ..format.manifest import StoredTensor
from ..read.reader import Checkpoint
from .copy import TileReader
from .plan import Selection, SlotCopy, slot_tiles

TILE: Final = 2**20  # elements


@dataclass(frozen=True, slots=True)
class Difference:
    """One slot of one tensor that differs between the two checkpoints.

    Attributes:
        tensor: the logical tensor's name.
        slot: the slot that differs.
        kind: "values"; or "shape" or "dtype" if values cannot be compared.
        message: the difference in words.
        dtype: the dtype in which the values were compared; "" if they were not.
        num_different: the number of elements whose bits differ in that dtype.
        max_difference: the largest |a - b|; None if a NaN or an infinity differs from the other value.
    """

    tensor: str
    slot: str
    kind: Literal["values", "shape", "dtype"]
    message: str
    dtype: str = ""
    num_different: int = 0
    max_difference: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison of two checkpoints.

    Attributes:
        a, b: the paths of the two checkpoints.
        only_in_a, only_in_b: "TENSOR" or "TENSOR, slot SLOT" for each that the other checkpoint lacks.
        num_equal: the number of slots of tensors that are bit-equal.
        differences: the slots that differ.
    """

    a: Path
    b: Path
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    num_equal: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether both hold the same tensors and slots with the same values."""
        return not (self.only_in_a or self.only_in_b or self.differences)

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as plain data."""
        return asdict(self) | {"a": str(self.a), "b": str(self.b), "same": self.same}


def compare(a: Checkpoint, b: Checkpoint, on_bytes: Callable[[int], None] = lambda _: None) -> Comparison:
    """Compares every slot of every tensor that both hold; a tied name has the values of the stored tensor.

    If dtypes differ, both values are cast to fp32; the fp32 value of a weight is its `master`, if it has one.

    Args:
        a, b: the checkpoints to compare.
        on_bytes: called with the number of bytes of `a` compared since the last call.

    Raises:
        ShardCorrupt: one of the two is damaged; the message names tensor, file and block.
    """
    keys_a, keys_b = _keys(a), _keys(b)
    differences: list[Difference] = []
    num_equal = 0
    with TileReader(a) as read_a, TileReader(b) as read_b:
        for name, slot in (key for key in keys_a if key in keys_b):
            found = _compare_slot(a, b, read_a, read_b, name, slot, on_bytes)
            differences += [found] if found else []
            num_equal += found is None
    only_a = tuple(_missing(keys_a, keys_b, b))
    only_b = tuple(_missing(keys_b, keys_a, a))
    return Comparison(a.path, b.path, only_a, only_b, num_equal, tuple(differences))


def equal_tensors(checkpoint: Checkpoint, one: str, two: str) -> bool:
    """Returns whether two weights of a checkpoint have equal values (0 equals -0); stops at the first difference."""
    first, second = (checkpoint.tensors[name] for name in (one, two))
    dtype, _ = _common_dtype(first, second, "weight")
    if first.shape != second.shape or dtype is None:
        return False
    with TileReader(checkpoint) as read_one, TileReader(checkpoint) as read_two:
        copies = (_slot_copy(checkpoint, name, "weight", dtype) for name in (one, two))
        tiles = zip(*(slot_tiles(copy, TILE) for copy in copies), strict=True)
        return all(_compare_values(read_one.load(a), read_two.load(b), dtype)[1] == 0 for a, b in tiles)


def compared_bytes(a: Checkpoint, b: Checkpoint) -> int:
    """Returns how many bytes of `a` `compare` reads."""
    keys_b = _keys(b)
    total = 0
    for name, slot in _keys(a):
        if (name, slot) in keys_b:
            dtype, _ = _common_dtype(a.tensors[name], b.tensors[name], slot)
            name, slot, _ = a.resolve(name, slot, dtype)
            total += sum(chunk.nbytes for chunk in a.chunks[name, slot])
    return total


def _keys(checkpoint: Checkpoint) -> dict[tuple[str, str], None]:
    return {(name, slot): None for name, tensor in checkpoint.tensors.items() for slot in tensor.slots}


def _missing(
    mine: dict[tuple[str, str], None], theirs: dict[tuple[str, str], None], other: Checkpoint
) -> Iterator[str]:
    """Yields the tensors and slots that `other` lacks.

    A master is not missing if `other` stores the weight in fp32: the two were compared.
    """
    for name, slot in mine:
        if name not in other.tensors:
            if slot == "weight":
                yield name
        elif (name, slot) not in theirs and not (slot == "master" and other.tensors[name].slots["weight"] == FP32.code):
            yield f"{name}, slot {slot}"


def _common_dtype(a: StoredTensor, b: StoredTensor, slot: str) -> tuple[DType | None, str]:
    """Returns the dtype in which to compare a slot; None and the reason if there is none."""
    one, two = (dtypes.by_code(tensor.slots[slot]) for tensor in (a, b))
    if one == two:
        return one, ""
    if one in dtypes.COMPUTE_DTYPES and two in dtypes.COMPUTE_DTYPES:
        return FP32, ""
    return None, f"{one.code} and {two.code} are not compared"


def _compare_slot(
    a: Checkpoint,
    b: Checkpoint,
    read_a: TileReader,
    read_b: TileReader,
    name: str,
    slot: str,
    on_bytes: Callable[[int], None],
) -> Difference | None:
    shape, other = a.tensors[name].shape, b.tensors[name].shape
    if shape != other:
        return Difference(name, slot, "shape", f"shape {list(shape)} and {list(other)}")
    dtype, reason = _common_dtype(a.tensors[name], b.tensors[name], slot)
    if dtype is None:
        return Difference(name, slot, "dtype", reason)
    num_different, largest = 0, 0.0
    copy_a, copy_b = _slot_copy(a, name, slot, dtype), _slot_copy(b, name, slot, dtype)
    for tile_a, tile_b in zip(slot_tiles(copy_a, TILE), slot_tiles(copy_b, TILE), strict=True):
        values = read_a.load(tile_a), read_b.load(tile_b)
        count, difference = _compare_values(*values, dtype)
        num_different += count
        largest = max(largest, difference)
        on_bytes(tile_a.region.size * copy_a.selection.source_dtype.itemsize)
    if not num_different:
        return None
    known = largest if np.isfinite(largest) else None
    message = f"{num_different} elements differ, by {largest:.3g} at most"
    return Difference(name, slot, "values", message, dtype.name, num_different, known)


def _slot_copy(checkpoint: Checkpoint, name: str, slot: str, dtype: DType) -> SlotCopy:
    stored_name, stored_slot, stored = checkpoint.resolve(name, slot, dtype)
    selection = Selection(name, slot, stored_slot, stored, dtype)
    return SlotCopy(selection, checkpoint.tensors[name].shape, checkpoint.chunks[stored_name, stored_slot], ())


def _compare_values(one: Array, two: Array, dtype: DType) -> tuple[int, float]:
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
