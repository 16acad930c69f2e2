"""A value per trained element: the reference's file of them, and how far the values of a mesh are from it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

from ..core.buckets import Shard
from ..core.errors import TkError
from ..core.tensors import Table
from ..parallel.collectives import all_reduce
from ..train.zero.flat_buffers import FlatBuffers

BLOCK: Final = 2**20  # elements compared at once
Values = np.ndarray[Any, np.dtype[np.float32]]
Runs = Iterable[tuple[Shard, torch.Tensor]]  # of those a rank updates, each with its values, fp32 1-D
Places = Mapping[str, tuple[int, tuple[int, ...]]]


def places_in_file(table: Table) -> Places:
    """Returns each trained tensor's place in a file: the number of elements before it, and its shape."""
    places, start = {}, 0
    for spec in table:
        if spec.trainable and not spec.alias:
            places[spec.name] = (start, spec.shape)
            start += math.prod(spec.shape)
    return places


def flat_values(runs: Runs, table: Table) -> Values:
    """Returns the values of a process that holds all of them, as a file stores them.

    Returns:
        fp32 [elements], in the table's order.
    """
    places = places_in_file(table)
    flat = np.full(sum(math.prod(shape) for _, shape in places.values()), np.nan, np.float32)
    for shard, values in runs:
        box = _whole(flat, places[shard.piece.tensor.name])[shard.piece.box.slices]
        filled = box.reshape(-1).copy()
        filled[slice(*shard.flat)] = values.numpy()
        box[...] = filled.reshape(box.shape)
    return flat


def square_differences(runs: Runs, buffers: FlatBuffers, table: Table, expected: Values) -> dict[str, float]:
    """Returns each tensor's squared distance from the reference's values, the same on every rank.

    Every rank compares the runs that it updates; the ranks exchange only sums of squares.

    Args:
        expected: the reference's values, fp32 [elements].

    Raises:
        TkError: the ranks together did not compare every element exactly once.
    """
    places = places_in_file(table)
    number = {name: index for index, name in enumerate(places)}
    sums = torch.zeros(len(places), 2, dtype=torch.float64)  # squared differences, elements
    for shard, values in runs:
        if not shard.piece.owner or buffers.buckets[shard.bucket].replicate.rank:
            continue
        name = shard.piece.tensor.name
        other = _whole(expected, places[name])[shard.piece.box.slices].reshape(-1)[slice(*shard.flat)]
        squares = square_distance(values.numpy(), other)
        sums[number[name]] += torch.tensor([squares, other.size], dtype=torch.float64)
    all_reduce(sums, buffers.mesh.world)
    for (name, (_, shape)), count in zip(places.items(), sums[:, 1].tolist(), strict=True):
        if count != math.prod(shape):
            raise TkError(
                f"{name}: the ranks compared {count:.0f} of its elements, which are {math.prod(shape)}; each must be "
                "compared once. This is a defect of tk."
            )
    return dict(zip(places, sums[:, 0].tolist(), strict=True))


def square_norms(values: Values, table: Table) -> dict[str, float]:
    """Returns each tensor's squared norm in a file of values."""
    return {name: square_distance(_whole(values, place).reshape(-1)) for name, place in places_in_file(table).items()}


def _whole(values: Values, place: tuple[int, tuple[int, ...]]) -> Values:
    start, shape = place
    return values[start : start + math.prod(shape)].reshape(shape)


def square_distance(values: Values, others: Values | None = None) -> float:
    """Returns the squared distance of two 1-D arrays, or of one to zero, summed in fp64.

    Only one block at a time is converted to fp64: parameters may be as large as memory allows.
    """
    total = 0.0
    for start in range(0, values.size, BLOCK):
        difference = values[start : start + BLOCK].astype(np.float64)
        if others is not None:
            difference -= others[start : start + BLOCK]
        total += float(np.square(difference, out=difference).sum())
    return total
