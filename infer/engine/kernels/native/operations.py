"""The operations of a program as the structures that the kernels run, with pointers to packed weights."""

from ctypes import Array as CArray

from .....core.errors import TkError
from ...program.lower import Program
from ...program.operations import (
    AttendToCache,
    Embed,
    Gate,
    Head,
    Multiply,
    Norm,
    Operation,
    Reduce,
    RotateAndAppend,
    Route,
    RunExperts,
)
from .adapters import AdapterSlots
from .binding.structures import Buffer, OperationKind, PackedMatrix, PreparedOperation
from .packing import PackedWeights

_BUFFERS = {each.name.lower(): each for each in Buffer}


def prepare_operations(program: Program, weights: PackedWeights, slots: AdapterSlots) -> CArray[PreparedOperation]:
    """Returns the operations of a program, which point to the memory of `weights` and `slots`.

    On one rank there is nothing to reduce: a product adds to hidden itself, unless its sum is weighted. The sampler,
    which is last, is left out.
    """
    prepared: list[PreparedOperation] = []
    for operation, following in zip(program.operations, program.operations[1:], strict=False):
        match operation:
            case Reduce(gate="") if program.tp == 1:
                continue
            case Multiply() if program.tp == 1 and isinstance(following, Reduce) and not following.gate:
                matrix = _matrix(weights, operation.matrix.name, following.bias)
                source, adapters = _BUFFERS[operation.source], slots.address(operation.matrix.name)
                places = {"source": source, "target": Buffer.HIDDEN, "adapters": adapters}
                prepared.append(PreparedOperation(kind=OperationKind.MULTIPLY, add=1, matrix=matrix, **places))
            case Norm():
                prepared.append(_norm(operation, weights, slots, wanted=isinstance(following, Head)))
            case _:
                prepared += _plain(operation, program, weights, slots)
    return (PreparedOperation * len(prepared))(*prepared)


def _plain(
    operation: Operation, program: Program, weights: PackedWeights, slots: AdapterSlots
) -> list[PreparedOperation]:
    match operation:
        case Embed():
            return _embed(operation, program, weights)
        case Multiply(source, target, matrix):
            places = {"source": _BUFFERS[source], "target": _BUFFERS[target], "adapters": slots.address(matrix.name)}
            product = _matrix(weights, matrix.name, "" if target == "partial" else matrix.bias)
            return [PreparedOperation(kind=OperationKind.MULTIPLY, matrix=product, **places)]
        case RotateAndAppend(layer, q_norm, k_norm, eps):
            norms = {"weight": _vector(weights, q_norm), "offset": _vector(weights, k_norm)}
            norms["vectors"] = slots.vectors_address(q_norm)
            factors = weights.key_factors[layer].ctypes.data if weights.key_factors else None
            return [PreparedOperation(kind=OperationKind.APPEND, layer=layer, eps=eps, factors=factors, **norms)]
        case AttendToCache(layer, window):
            return [PreparedOperation(kind=OperationKind.ATTEND, layer=layer, window=window or 0)]
        case Gate(kind, columns):
            shape = PackedMatrix(inputs=columns)
            return [PreparedOperation(kind=OperationKind.GATE, variant=int(kind == "gelu_new"), matrix=shape)]
        case Route():
            return [_route(operation, weights)]
        case RunExperts(gate_up, down, num_experts):
            matrices = {"matrix": weights.matrices[gate_up], "second": weights.matrices[down]}
            top_k = next(each.top_k for each in program.operations if isinstance(each, Route))
            sizes = {"experts": num_experts, "top_k": top_k}
            sums = {"target": Buffer.HIDDEN, "add": 1} if program.tp == 1 else {"target": Buffer.PARTIAL}
            adapters = {"adapters": slots.address(gate_up), "second_adapters": slots.address(down)}
            return [PreparedOperation(kind=OperationKind.EXPERTS, **sizes, **sums, **matrices, **adapters)]
        case Reduce(bias, gate):
            vectors = {"offset": _vector(weights, bias), "weight": _vector(weights, gate)}
            return [PreparedOperation(kind=OperationKind.REDUCE, add=1, **vectors)]
        case Head(matrix):
            product = _matrix(weights, matrix.name, "")
            return [PreparedOperation(kind=OperationKind.HEAD, matrix=product, heads=slots.heads_address())]
    raise TkError(f"The native backend does not run {type(operation).__name__}.")


def _embed(operation: Embed, program: Program, weights: PackedWeights) -> list[PreparedOperation]:
    target = Buffer.HIDDEN if program.tp == 1 else Buffer.PARTIAL
    embed = PreparedOperation(kind=OperationKind.EMBED, target=target, rows=operation.num_rows)
    if operation.positions:
        embed.positions = weights.tables[operation.positions].ctypes.data
    if operation.table in weights.matrices:  # tied to the head, and stored once
        embed.variant, embed.matrix = 1, weights.matrices[operation.table]
    else:
        embed.table = weights.tables[operation.table].ctypes.data
    return [embed] if program.tp == 1 else [embed, PreparedOperation(kind=OperationKind.REDUCE)]


def _route(operation: Route, weights: PackedWeights) -> PreparedOperation:
    return PreparedOperation(
        kind=OperationKind.ROUTE,
        source=Buffer.NORMED,
        target=Buffer.SCORES,
        matrix=_matrix(weights, operation.matrix.name, ""),
        offset=_vector(weights, operation.bias),
        variant=int(operation.scoring == "sigmoid"),
        top_k=operation.top_k,
        normalize=int(operation.normalize),
        experts=operation.matrix.out_features,
        groups=operation.num_groups,
        top_groups=operation.top_groups,
        scale=operation.scale,
    )


def _norm(operation: Norm, weights: PackedWeights, slots: AdapterSlots, wanted: bool) -> PreparedOperation:
    return PreparedOperation(
        kind=OperationKind.NORM,
        variant=int(operation.kind == "layer"),
        weight=_vector(weights, operation.weight),
        offset=_vector(weights, operation.bias),
        eps=operation.eps,
        wanted=int(wanted),
        vectors=slots.vectors_address(operation.weight),
    )


def _vector(weights: PackedWeights, name: str) -> int | None:
    return weights.vectors[name].ctypes.data if name else None


def _matrix(weights: PackedWeights, name: str, bias: str) -> PackedMatrix:
    """Returns a copy of a packed weight's structure, with a bias."""
    matrix = PackedMatrix.from_buffer_copy(weights.matrices[name])
    matrix.bias = _vector(weights, bias)
    return matrix
