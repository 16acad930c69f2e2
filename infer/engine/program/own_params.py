"""The parameters of a program that an adapter may have in place of the base's: norms, biases and the head."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from ....core.integers import round_up
from ....model.spec import HEAD
from .lower import Program
from .operations import Head, Multiply, Norm, Reduce, RotateAndAppend, WeightMatrix

_WIDE: Final = 4  # bytes of a value of a vector, which kernels keep in fp32
_LINE: Final = 16  # values to a multiple of which kernels pad a vector, and rows of a matrix


def norm_params(program: Program) -> Iterator[tuple[str, str]]:
    """Yields weight and bias of each norm, and the norms of query and of key heads; "" for one that is not there."""
    for operation in program.operations:
        if isinstance(operation, Norm):
            yield operation.weight, operation.bias
        elif isinstance(operation, RotateAndAppend) and operation.q_norm:
            yield operation.q_norm, operation.k_norm


def linear_biases(program: Program) -> Mapping[str, str]:
    """Returns the biases of linear layers by the names of their weights.

    The change of a bias is a part of its product. So the bias of a sum that is weighted is not among them.
    """
    found = {}
    for operation, following in pairwise(program.operations):
        if isinstance(operation, Multiply):
            own = following.bias if isinstance(following, Reduce) and not following.gate else ""
            found[operation.matrix.name] = operation.matrix.bias or own
    return {weight: bias for weight, bias in found.items() if bias}


def summed_biases(program: Program) -> frozenset[str]:
    """Returns the biases that are added to sums over ranks: their change is a part of the first rank's product."""
    return frozenset(each.bias for each in program.operations if isinstance(each, Reduce) and each.bias)


def own_head(program: Program) -> WeightMatrix | None:
    """Returns the head that an adapter may have of its own; None if it is tied to the embedding."""
    head = next(each.matrix for each in program.operations if isinstance(each, Head))
    return head if head.name == HEAD else None


def own_params(program: Program) -> frozenset[str]:
    """Returns the names of all parameters that an adapter may have of its own."""
    head = own_head(program)
    vectors = {name for pair in norm_params(program) for name in pair if name} | {*linear_biases(program).values()}
    return frozenset(vectors if head is None else vectors | {head.name})


def vector_bytes(program: Program) -> int:
    """Returns the bytes of all norms and biases of an adapter's own."""
    names = own_params(program) - {HEAD}
    return sum(_WIDE * round_up(param.size, _LINE) for param in program.params if param.name in names)


def head_bytes(program: Program, itemsize: int) -> int:
    """Returns the bytes of a head of an adapter's own; 0 if it can have none."""
    head = own_head(program)
    return itemsize * round_up(head.out_features, _LINE) * round_up(head.in_features, 2 * _LINE) if head else 0
