"""The parameters of the ranks at one (pp, tp) position: boxes of logical tensors, stacked and possibly padded."""

import math
from dataclasses import dataclass, replace

from .errors import ParallelError
from .families import TensorFamily
from .geometry import Box
from .integers import ceil_div
from .layout import Layout, stages
from .tensors import Table, TensorSpec, is_owner, num_holders, split_boxes


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a logical tensor inside a local parameter.

    Attributes:
        tensor: the logical tensor.
        box: the part of the tensor, contiguous in the parameter in row-major order.
        start: the number of the parameter's elements before the box.
        owner: whether this is the lowest (pp, tp) position with the box, which saves it and counts its norm.
        num_holders: the number of neighbouring tensor-parallel ranks with the same box of a split tensor (replicated
            kv heads), over which its gradient is summed; 1 for a tensor that is not split.
    """

    tensor: TensorSpec
    box: Box
    start: int
    owner: bool
    num_holders: int = 1


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A parameter as one (pp, tp) position holds it.

    Attributes:
        name: the name of the module's parameter.
        shape: the shape of the parameter on this position.
        pieces: the boxes of logical tensors in it, stacked along dim 0; rows after the last are padding.
        stage: the index of its stage among those of this pipeline rank.
        tied: whether another pipeline rank holds a copy (tied embeddings), so that the gradients are summed.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stage: int = 0
    tied: bool = False

    @property
    def size(self) -> int:
        """The number of elements, including padding."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: to tensors of 2 or more dims only."""
        return len(self.shape) >= 2

    @property
    def unit(self) -> int | str:
        """The unit that computes with it: the index of a decoder layer, or "first" or "last" for the other modules."""
        return self.pieces[0].tensor.layer

    @property
    def family(self) -> TensorFamily:
        """The family of its tensors."""
        return self.pieces[0].tensor.family

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates the parameter."""
        return self.pieces[0].tensor.trainable


def local_params(table: Table, layout: Layout, pp: int, tp: int) -> tuple[LocalParam, ...]:
    """Returns the parameters that position (pp, tp) holds, in the table's order.

    A tied tensor is a parameter of its own only if its original is on another pipeline rank.

    Raises:
        ParallelError: the layout does not fit the table, or a fused parameter is frozen in part.
    """
    mine = stages(table, layout, pp)
    stage_of = {spec.name: number for number, stage in enumerate(mine) for spec in table if stage.holds(spec)}
    tied = {name for spec in table if spec.alias and layout.pp > 1 for name in (spec.name, spec.alias)}
    members: dict[str, list[TensorSpec]] = {}
    for spec in table:
        if spec.name in stage_of and spec.alias not in stage_of:
            members.setdefault(spec.param or spec.name, []).append(spec)
    return tuple(
        replace(_local_param(name, specs, layout.tp, tp), stage=stage_of[specs[0].name], tied=specs[0].name in tied)
        for name, specs in members.items()
    )


def _local_param(name: str, specs: list[TensorSpec], tp: int, rank: int) -> LocalParam:
    pieces: list[Piece] = []
    start = 0
    for spec in specs:
        for box in split_boxes(spec, tp, rank):
            pieces.append(Piece(spec, box, start, is_owner(spec, tp, rank), num_holders(spec, tp)))
            start += box.size
    first = specs[0]
    if len({spec.trainable for spec in specs}) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise ParallelError(f"The module fuses {names} into one parameter, {name}: freeze all of them or none.")
    assert len(specs) == 1 or all(spec.family == first.family for spec in specs), f"{name} fuses two families"
    shape = list(pieces[0].box.shape)
    if len(pieces) > 1:
        shape[0] = sum(piece.box.shape[0] for piece in pieces)
    elif first.split and first.split.rule == "pad":
        if first.split.dim != 0:
            raise ParallelError(f"{first.name}: tk pads dim 0 only, not dim {first.split.dim}.")
        shape[0] = ceil_div(first.shape[0], tp)
    return LocalParam(name, tuple(shape), tuple(pieces))
