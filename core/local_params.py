"""The parameters that one (pp, tp) position holds: boxes of logical tensors, stacked and possibly padded."""

import math
from dataclasses import dataclass, replace

from .errors import ParallelError
from .geometry import Box
from .integers import ceil_div
from .layout import Layout, stages
from .tensors import Table, TensorSpec, is_owner, num_holders, split_boxes


@dataclass(frozen=True, slots=True)
class Piece:
    """One logical box inside a local parameter.

    Attributes:
        start: elements of the parameter's flat buffer before it; the box lies there contiguously in row-major order.
        owner: whether this (pp, tp) position is the lowest that holds the box, so saves it and counts its norm.
        num_holders: neighbouring tensor-parallel ranks with this very box of a split tensor (replicated kv heads),
            over which its gradient is summed; 1 for a tensor that is not split.
    """

    tensor: TensorSpec
    box: Box
    start: int
    owner: bool
    num_holders: int = 1


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A parameter as one (pp, tp) position holds it: pieces stacked along dim 0, rows beyond them are padding.

    Attributes:
        stage: which of the position's stages it lives on.
        tied: whether another pipeline rank holds a copy of it (tied embeddings), so that their gradients are summed.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stage: int = 0
    tied: bool = False

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Whether it takes weight decay, as tensors of 2 or more dims do."""
        return len(self.shape) >= 2

    @property
    def unit(self) -> int | str:
        """What computes with it: its decoder layer, or the end of the pipeline it lives on."""
        return self.pieces[0].tensor.layer

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates it."""
        return self.pieces[0].tensor.trainable


def local_params(table: Table, layout: Layout, pp: int, tp: int) -> tuple[LocalParam, ...]:
    """The parameters that position (pp, tp) holds, in the table's order.

    A tied tensor is a parameter of its own only where its original is on another pipeline rank.
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
        raise ParallelError(f"{names} are one parameter, {name}: freeze all of them or none.")
    shape = list(pieces[0].box.shape)
    if len(pieces) > 1:
        shape[0] = sum(piece.box.shape[0] for piece in pieces)
    elif first.split and first.split.rule == "pad":
        if first.split.dim != 0:
            raise ParallelError(f"{first.name}: only rows can be padded, not dim {first.split.dim}.")
        shape[0] = ceil_div(first.shape[0], tp)
    return LocalParam(name, tuple(shape), tuple(pieces))
