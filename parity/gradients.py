"""The first step's gradients: the reference's file of them, and the comparison of a layout's gradients with it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ..core.errors import TkError
from ..core.tensors import Table
from ..parallel.collectives import all_reduce
from ..train.zero.flat_buffers import FlatBuffers
from .judge import TOTAL_SHARE, relative

BLOCK: Final = 2**20  # elements compared at once
Gradients = np.ndarray[Any, np.dtype[np.float32]]


def _places(table: Table) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Returns each trained tensor's place in the file of first gradients: the elements before it, and its shape."""
    places, start = {}, 0
    for spec in table:
        if spec.trainable and not spec.alias:
            places[spec.name] = (start, spec.shape)
            start += math.prod(spec.shape)
    return places


def first_gradients(buffers: FlatBuffers, table: Table) -> Gradients:
    """Returns the gradients of a process that holds all of them, as the file stores them.

    Returns:
        fp32 [elements], in the table's order.
    """
    places = _places(table)
    flat = np.full(sum(math.prod(shape) for _, shape in places.values()), np.nan, np.float32)
    for shard, grads in buffers.own_runs():
        start, shape = places[shard.piece.tensor.name]
        whole = flat[start : start + math.prod(shape)].reshape(shape)
        box = whole[shard.piece.box.slices]
        values = box.reshape(-1).copy()
        values[slice(*shard.flat)] = grads.numpy()
        box[...] = values.reshape(box.shape)
    return flat


def compare_gradients(buffers: FlatBuffers, table: Table, expected: Gradients) -> dict[str, Any]:
    """Compares the mesh's gradients with the reference's.

    Every rank compares the runs that it updates; the ranks exchange only sums of squares.

    Args:
        expected: the reference's first gradients, fp32 [elements].

    Returns:
        "gradients": the largest difference over all parameters, relative as in `judge.py`; "parameter": its parameter.

    Raises:
        TkError: the ranks together did not compare every element exactly once.
    """
    places, mesh = _places(table), buffers.mesh
    number = {name: index for index, name in enumerate(places)}
    sums = torch.zeros(len(places), 2, dtype=torch.float64)  # squared differences, elements
    for shard, grads in buffers.own_runs():
        if not shard.piece.owner or mesh.replicate.rank:
            continue
        start, shape = places[shard.piece.tensor.name]
        whole = expected[start : start + math.prod(shape)].reshape(shape)
        values = whole[shard.piece.box.slices].reshape(-1)[slice(*shard.flat)]
        squares = square_distance(grads.numpy(), values)
        sums[number[shard.piece.tensor.name]] += torch.tensor([squares, values.size], dtype=torch.float64)
    all_reduce(sums, mesh.world)
    _check_complete(places, sums[:, 1].tolist())
    norms = [math.sqrt(square_distance(expected[start : start + math.prod(shape)])) for start, shape in places.values()]
    ratios = relative_differences(sums[:, 0].sqrt().tolist(), norms)
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    return {"gradients": ratios[worst], "parameter": list(places)[worst]}


def square_distance(values: Gradients, others: Gradients | None = None) -> float:
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


def relative_differences(differences: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Returns each |g - g0| / (|g0| + TOTAL_SHARE |G|), G being all g0 together; see `relative`."""
    total = math.hypot(*norms)
    return [relative(one, norm + TOTAL_SHARE * total) for one, norm in zip(differences, norms, strict=True)]


def _check_complete(places: Mapping[str, tuple[int, tuple[int, ...]]], counts: Sequence[float]) -> None:
    for (name, (_, shape)), count in zip(places.items(), counts, strict=True):
        if count != math.prod(shape):
            raise TkError(
                f"{name}: the ranks compared {count:.0f} elements of its gradient, which has {math.prod(shape)}; each "
                "must be compared once. This is a defect of tk."
            )
