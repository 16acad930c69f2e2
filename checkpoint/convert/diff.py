"""Comparison of two checkpoints' values, at any two layouts, in memory that does not grow with the model.

Both are read like a copy's source: tile after tile of each logical tensor, strictly forward, with every byte checked.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.dtypes import FP32
from ..read.reader import Checkpoint
from .copy import TileReader
from .plan import slot_tiles
from .tensor_values import TILE, common_dtype, compare_values, slot_copy


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
        CheckpointError: one of the two was changed while it was read.
    """
    keys_a, keys_b = _keys(a), _keys(b)
    differences: list[Difference] = []
    num_equal = 0
    with TileReader(a) as read_a, TileReader(b) as read_b:
        for name, slot in (key for key in keys_a if key in keys_b):
            found = _compare_slot(a, b, read_a, read_b, name, slot, on_bytes)
            differences += [found] if found else []
            num_equal += found is None
    a.folder.require_unchanged()
    b.folder.require_unchanged()
    only_a = tuple(_missing(keys_a, keys_b, b))
    only_b = tuple(_missing(keys_b, keys_a, a))
    return Comparison(a.path, b.path, only_a, only_b, num_equal, tuple(differences))


def compared_bytes(a: Checkpoint, b: Checkpoint) -> int:
    """Returns how many bytes of `a` `compare` reads."""
    keys_b = _keys(b)
    total = 0
    for name, slot in _keys(a):
        if (name, slot) in keys_b:
            dtype, _ = common_dtype(a.tensors[name], b.tensors[name], slot)
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
    dtype, reason = common_dtype(a.tensors[name], b.tensors[name], slot)
    if dtype is None:
        return Difference(name, slot, "dtype", reason)
    num_different, largest = 0, 0.0
    copy_a, copy_b = slot_copy(a, name, slot, dtype), slot_copy(b, name, slot, dtype)
    for tile_a, tile_b in zip(slot_tiles(copy_a, TILE), slot_tiles(copy_b, TILE), strict=True):
        values = read_a.load(tile_a), read_b.load(tile_b)
        count, difference = compare_values(*values, dtype)
        num_different += count
        largest = max(largest, difference)
        on_bytes(tile_a.region.size * copy_a.selection.source_dtype.itemsize)
    if not num_different:
        return None
    known = largest if np.isfinite(largest) else None
    message = f"{num_different} elements differ, by {largest:.3g} at most"
    return Difference(name, slot, "values", message, dtype.name, num_different, known)
