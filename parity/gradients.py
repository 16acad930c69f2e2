"""First gradients in a file and beside it: what a layout's are compared with, range by range."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ..core.errors import TkError
from ..core.tensors import Table
from ..parallel.collectives import all_reduce
from ..train.zero.flat_buffers import FlatBuffers
from .judge import TOTAL_SHARE

BLOCK: Final = 2**20  # elements that are compared at once
Gradients = np.ndarray[Any, np.dtype[np.float32]]


def _places(table: Table) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where each trained tensor lies in the file of first gradients: elements before it, and its shape."""
    places, start = {}, 0
    for spec in table:
        if spec.trainable and not spec.alias:
            places[spec.name] = (start, spec.shape)
            start += math.prod(spec.shape)
    return places


def first_gradients(buffers: FlatBuffers, table: Table) -> Gradients:
    """The gradients that one process has at hand, as they go into the file: fp32, 1-D, in the table's order."""
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
    """The largest difference over all parameters of this rank's mesh, relative as in `judge.py`, and whose it is.

    Every rank compares what it updates, wherever that lies in the logical tensors; only sums of squares travel.

    Args:
        expected: the reference's first gradients.

    Raises:
        TkError: the ranks' runs together are not every element once.
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
    """Sum of squares of the differences of 1-D arrays (or of one to zero), in fp64 for a block at a time: parameters
    may be as large as memory allows."""
    total = 0.0
    for start in range(0, values.size, BLOCK):
        difference = values[start : start + BLOCK].astype(np.float64)
        if others is not None:
            difference -= others[start : start + BLOCK]
        total += float(np.square(difference, out=difference).sum())
    return total


def relative_differences(differences: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Each |g - g0| / (|g0| + share |G|), G being all g0 together; infinite for what is no number."""
    total = math.hypot(*norms)
    ratios = (one / (norm + TOTAL_SHARE * total) for one, norm in zip(differences, norms, strict=True))
    return [ratio if math.isfinite(ratio) else math.inf for ratio in ratios]


def _check_complete(places: Mapping[str, tuple[int, tuple[int, ...]]], counts: Sequence[float]) -> None:
    for (name, (_, shape)), count in zip(places.items(), counts, strict=True):
        if count != math.prod(shape):
            raise TkError(
                f"{name}: the ranks compared {count:.0f} elements of its gradient, and it has {math.prod(shape)}."
            )
