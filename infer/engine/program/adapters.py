"""The factors of a low-rank adapter (LoRA, arXiv 2106.09685) on one rank, beside the weights of a program.

y = W x + b + scale B u, where u = A x. The factors of a row-parallel weight follow its inputs: a rank has the columns
of A that it has of W, and adds its part of the sum. Those of a column-parallel weight follow its outputs.
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
from ....model.lora.table import factor_name, is_factor, leaf
from ....model.spec import DecoderSpec
from .lower import Program
from .operations import Multiply, WeightMatrix
from .weights import load_params

_LINE: Final = 16  # rows that kernels keep together
_PAD: Final = 256  # columns, at most, that kernels add to a row


@dataclass(frozen=True, slots=True, eq=False)
class UpFactor:
    """B of one adapter, which adds to some outputs of a weight.

    Attributes:
        values: [outputs, rank]; bf16 as bit patterns in uint16.
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
    """

    down: Array
    ups: tuple[UpFactor, ...]


# An adapter on one rank, by the names of weights; other weights have no factors.
RankAdapter = Mapping[str, WeightAdapter]


def adapted_matrices(program: Program) -> Iterator[WeightMatrix]:
    """Yields the weights that may have an adapter: those of linear layers, without routers, experts and the head."""
    yield from (each.matrix for each in program.operations if isinstance(each, Multiply))


def adapter_bytes(program: Program, rank: int, itemsize: int) -> int:
    """Returns the bytes of an adapter that has factors of a rank beside every weight, padded as kernels need it."""
    return sum(
        itemsize
        * (padded_ranks(program, matrix, rank) * (matrix.in_features + _PAD) + _up_values(program, matrix, rank))
        for matrix in adapted_matrices(program)
    )


def padded_ranks(program: Program, matrix: WeightMatrix, rank: int) -> int:
    """Returns the rows of A of a weight, of all its linear layers, if each has an adapter of a rank."""
    return round_up(_num_layers(program, matrix) * rank, _LINE)


def _up_values(program: Program, matrix: WeightMatrix, rank: int) -> int:
    return (matrix.out_features + 2 * _LINE * _num_layers(program, matrix)) * round_up(rank, 2)


def _num_layers(program: Program, matrix: WeightMatrix) -> int:
    """Returns the number of linear layers whose weights are stacked in one."""
    return next(len({piece.tensor for piece in param.pieces}) for param in program.params if param.name == matrix.name)


def load_adapter(program: Program, adapted: DecoderSpec, checkpoint: Checkpoint, dtype: DType) -> RankAdapter:
    """Reads the factors of a rank from an adapter's checkpoint.

    Args:
        program: the rank's program.
        adapted: the model with the adapter (see `StoredAdapter.decoder`).
        checkpoint: the adapter's checkpoint.
        dtype: the dtype of the factors.

    Raises:
        CheckpointError: a tensor is missing, of another shape or damaged.
    """
    held = local_params(adapted.table, Layout(tp=program.tp), program.rank)
    found: dict[str, Array] = {}
    factors = [param for param in held if is_factor(param.pieces[0].tensor)]
    load_params(factors, (), checkpoint, dtype, lambda param, values: found.update({param.name: values}))
    weights = {param.name: param for param in program.params}
    return {
        matrix.name: WeightAdapter(
            found[factor_name(matrix.name, "A")], tuple(_ups(weights[matrix.name], adapted, found))
        )
        for matrix in adapted_matrices(program)
        if factor_name(matrix.name, "A") in found
    }


def _ups(weight: LocalParam, adapted: DecoderSpec, found: Mapping[str, Array]) -> Iterator[UpFactor]:
    row = first_rank = 0
    for tensor, rows in rows_of(weight, adapted.transposed).items():
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
