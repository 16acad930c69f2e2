"""The factors of a low-rank adapter (LoRA, arXiv 2106.09685) on one rank, beside the weights of a program.

y = W x + b + scale B u, where u = A x. The factors of a row-parallel weight follow its inputs: a rank has the columns
of A that it has of W, and adds its part of the sum. Those of a column-parallel weight follow its outputs. Norms, biases
and the head may be trained whole: such an adapter has them in place of the base's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ....checkpoint.read.reader import Checkpoint
from ....core.casts import Array
from ....core.dtypes import DType
from ....core.integers import round_up
from ....core.layout import Layout
from ....core.local_params import LocalParam, local_params
from ....core.tensors import TensorSpec
from ....model.lora.table import factor_name, leaf
from ....model.spec import DecoderSpec
from .lower import Program
from .operations import Multiply, RunExperts, WeightMatrix
from .own_params import summed_biases, vector_bytes
from .weights import load_params

_LINE: Final = 16  # rows that kernels keep together
_PAD: Final = 256  # columns, at most, that kernels add to a row


@dataclass(frozen=True, slots=True, eq=False)
class UpFactor:
    """B of one adapter, which adds to some outputs of a weight.

    Attributes:
        values: [outputs, rank], those of experts one below the other; bf16 as bit patterns in uint16.
        first_row: its first output, among those of the weight on this rank.
        first_rank: its first row of A, among those of the weight.
        scale: the factor of its product.
    """

    values: Array
    first_row: int
    first_rank: int
    scale: float

    @property
    def rank(self) -> int:
        """The rows of A that are its own."""
        return int(self.values.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class WeightAdapter:
    """The factors beside one weight: several pairs where the weight has several linear layers (queries, keys, values).

    Attributes:
        down: A of all pairs, one below the other: [ranks, in_features].
        ups: B of each pair.
        num_experts: the number of experts whose factors lie one below the other, A in `down` and B in each of `ups`;
            places and ranks are those of one. 1 beside another weight.
    """

    down: Array
    ups: tuple[UpFactor, ...]
    num_experts: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class RankAdapter:
    """An adapter on one rank.

    Attributes:
        beside: the factors, by the names of weights; other weights have none.
        own: the parameters that it has in place of the base's, by name (see `own_params.py`). The first rank alone has
            the biases that are added to sums over ranks.
    """

    beside: Mapping[str, WeightAdapter]
    own: Mapping[str, Array]


def adapted_matrices(program: Program) -> Iterator[WeightMatrix]:
    """Yields the weights that may have an adapter: those of linear layers, without routers, experts and the head."""
    yield from (each.matrix for each in program.operations if isinstance(each, Multiply))


def expert_matrices(program: Program) -> Iterator[tuple[WeightMatrix, int]]:
    """Yields the weights of experts, each with the sizes of one expert, and the number of experts in it."""
    for each in program.operations:
        if isinstance(each, RunExperts):
            yield WeightMatrix(each.gate_up, program.hidden_size, 2 * each.inner), each.num_experts
            yield WeightMatrix(each.down, each.inner, program.hidden_size), each.num_experts


def adapter_bytes(program: Program, rank: int, itemsize: int) -> int:
    """Returns the bytes of an adapter without experts and head that has all else, padded as kernels need it.

    It has factors of a rank beside every weight, and norms and biases of its own.
    """
    factors = sum(_num_values(program, matrix, rank) for matrix in adapted_matrices(program))
    return itemsize * factors + vector_bytes(program)


def expert_bytes(program: Program, rank: int, itemsize: int) -> int:
    """Returns the bytes of an adapter's factors of a rank beside all weights of experts; 0 for a model without them."""
    return itemsize * sum(count * _num_values(program, matrix, rank) for matrix, count in expert_matrices(program))


def _num_values(program: Program, matrix: WeightMatrix, rank: int) -> int:
    up = (matrix.out_features + 2 * _LINE * _num_layers(program, matrix)) * round_up(rank, 2)
    return padded_ranks(program, matrix, rank) * (matrix.in_features + _PAD) + up


def padded_ranks(program: Program, matrix: WeightMatrix, rank: int) -> int:
    """Returns the rows of A of a weight, of all its linear layers, if each has an adapter of a rank."""
    return round_up(_num_layers(program, matrix) * rank, _LINE)


def _num_layers(program: Program, matrix: WeightMatrix) -> int:
    """Returns the number of linear layers whose weights are stacked in one, of one expert."""
    pieces = next(param.pieces for param in program.params if param.name == matrix.name)
    return len({piece.tensor for piece in pieces if not piece.tensor.expert})


def load_adapter(program: Program, adapted: DecoderSpec, checkpoint: Checkpoint, dtype: DType) -> RankAdapter:
    """Reads a rank's part of an adapter.

    Args:
        program: the rank's program.
        adapted: the model with the adapter (see `StoredAdapter.decoder`).
        checkpoint: the adapter's checkpoint.
        dtype: the dtype of its values.

    Raises:
        CheckpointError: a tensor is missing, of another shape or damaged.
    """
    others = summed_biases(program) if program.rank else frozenset()
    held = [
        param
        for param in local_params(adapted.table, Layout(tp=program.tp), program.rank)
        if param.name not in others and any(piece.tensor.stored for piece in param.pieces)
    ]
    found: dict[str, Array] = {}
    load_params(held, (), checkpoint, dtype, lambda param, values: found.update({param.name: values}))
    weights = {param.name: param for param in program.params}
    matrices = [*((matrix, 1) for matrix in adapted_matrices(program)), *expert_matrices(program)]
    beside = {
        matrix.name: WeightAdapter(
            found[factor_name(matrix.name, "A")], tuple(_ups(weights[matrix.name], adapted, found)), num_experts
        )
        for matrix, num_experts in matrices
        if factor_name(matrix.name, "A") in found
    }
    return RankAdapter(beside, {name: values for name, values in found.items() if name in weights})


def _ups(weight: LocalParam, adapted: DecoderSpec, found: Mapping[str, Array]) -> Iterator[UpFactor]:
    row = first_rank = 0
    for tensor, rows in rows_of(weight, adapted.transposed).items():
        if tensor.expert:
            continue  # all experts are as the first one
        adapter = adapted.adapters.get(tensor.name)
        if adapter is not None:
            values = found[factor_name(weight.name, f"B.{leaf(tensor.name)}")]
            yield UpFactor(values, row, first_rank, adapter.scale)
            first_rank += adapter.rank
        row += rows


def rows_of(weight: LocalParam, transposed: bool) -> dict[TensorSpec, int]:
    """Returns the tensors of a weight in their order, with the number of outputs that each has on this rank."""
    rows: dict[TensorSpec, int] = {}
    for piece in weight.pieces:
        rows[piece.tensor] = rows.get(piece.tensor, 0) + piece.box.shape[int(transposed)]
    return rows
