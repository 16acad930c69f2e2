"""The first step's gradients: those of one process, and the comparison of a layout's gradients with them."""

import math
from collections.abc import Sequence
from typing import Any

from ..core.tensors import Table
from ..train.zero.flat_buffers import FlatBuffers
from .flat_values import Values, flat_values, square_differences, square_norms
from .judge import TOTAL_SHARE, relative


def first_gradients(buffers: FlatBuffers, table: Table) -> Values:
    """Returns the gradients of a process that holds all of them, fp32 [elements] in the table's order."""
    return flat_values(buffers.own_runs(), table)


def compare_gradients(buffers: FlatBuffers, table: Table, expected: Values) -> dict[str, Any]:
    """Compares the mesh's gradients with the reference's.

    Args:
        expected: the reference's first gradients, fp32 [elements].

    Returns:
        "gradients": the largest difference over all parameters, relative as in `judge.py`; "parameter": its parameter.

    Raises:
        TkError: the ranks together did not compare every element exactly once.
    """
    squares = square_differences(buffers.own_runs(), buffers, table, expected)
    norms = square_norms(expected, table).values()
    ratios = relative_differences([math.sqrt(one) for one in squares.values()], [math.sqrt(one) for one in norms])
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    return {"gradients": ratios[worst], "parameter": list(squares)[worst]}


def relative_differences(differences: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Returns each |g - g0| / (|g0| + TOTAL_SHARE |G|), G being all g0 together; see `relative`."""
    total = math.hypot(*norms)
    return [relative(one, norm + TOTAL_SHARE * total) for one, norm in zip(differences, norms, strict=True)]
