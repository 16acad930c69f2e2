"""The weights after some updates: those of one process, and the comparison of a layout's weights with them."""

import math
from typing import Any

from ..core.tensors import Table
from ..train.zero.sharded_adamw import ShardedAdamW
from .flat_values import Values, flat_values, square_differences, square_distance
from .judge import relative


def updated_weights(optimizer: ShardedAdamW, table: Table) -> Values:
    """Returns the fp32 masters of a process that updates all of them, fp32 [elements] in the table's order."""
    return flat_values(optimizer.runs("master"), table)


def compare_weights(optimizer: ShardedAdamW, table: Table, expected: Values) -> dict[str, Any]:
    """Compares the mesh's fp32 masters with the reference's.

    Args:
        expected: the reference's masters after as many updates, fp32 [elements].

    Returns:
        "updates": |w - w1| / |w1|, w1 being the reference's trained tensors together.

    Raises:
        TkError: the ranks together did not compare every element exactly once.
    """
    squares = square_differences(optimizer.runs("master"), optimizer.buffers, table, expected)
    return {"updates": relative(math.sqrt(sum(squares.values())), math.sqrt(square_distance(expected)))}
