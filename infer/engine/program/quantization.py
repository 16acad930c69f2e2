"""The quantization of a program's weights at load: which parameters, and in which groups of columns, without torch.

A group never crosses a slice that some number of ranks makes of the columns, so every rank finds the same codes as one
rank alone.
"""

from collections.abc import Iterator

from ....core.quantization import FEWEST_COLUMNS, Grouping, group_columns
from ..options import WEIGHT_DTYPES
from .lower import Program
from .operations import Embed, Head, Multiply, RunExperts


def groupings(program: Program, weight_dtype: str) -> dict[str, Grouping]:
    """Returns the parameters of a program that are quantized, with their groupings.

    These are all matrix products, experts included, and the token embedding; routers, norms, biases and learned
    positions are not quantized. In int4 head and embedding have 8 bits. A parameter whose columns have no divisor of at
    least FEWEST_COLUMNS and at most MOST_COLUMNS is not quantized either.

    Args:
        program: the program of any rank.
        weight_dtype: "int8" or "int4"; another value quantizes nothing.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        return {}
    bits = 8 if weight_dtype == "int8" else 4
    found = {name: Grouping(size, group_columns(segment, size)) for name, segment, size in _matrices(program, bits)}
    return {name: each for name, each in found.items() if each.columns >= FEWEST_COLUMNS}


def _matrices(program: Program, bits: int) -> Iterator[tuple[str, int, int]]:
    """Yields the name, the columns of the slices that groups divide, and the bits of each parameter."""
    for operation in program.operations:
        if isinstance(operation, Embed):
            yield operation.table, program.hidden_size, 8
        elif isinstance(operation, Head):
            yield operation.matrix.name, program.hidden_size, 8
        elif isinstance(operation, Multiply):
            slices = program.group_slices if operation.target == "partial" else 1
            yield operation.matrix.name, operation.matrix.in_features // slices, bits
        elif isinstance(operation, RunExperts):
            yield operation.gate_up, program.hidden_size, bits
            yield operation.down, operation.inner // program.group_slices, bits
