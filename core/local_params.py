"""The parameters of one rank: boxes of logical tensors, stacked and possibly padded."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .errors import ParallelError
from .families import TensorFamily
from .geometry import Box
from .integers import ceil_div
from .layout import Layout, stages
from .places import Spread
from .tensors import Table, TensorSpec, is_owner, num_experts, num_holders, split_boxes


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a logical tensor inside a local parameter.

    Attributes:
        tensor: the logical tensor.
        box: the part of the tensor, contiguous in the parameter in row-major order.
        start: the number of the parameter's elements before the box.
        owner: whether the rank has the lowest pp, ep and tp of all ranks with the box; these save it and count its
            norm.
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
    """A parameter as one rank holds it.

    Attributes:
        name: the name of the module's parameter.
        shape: the shape of the parameter on this rank.
        pieces: the boxes of logical tensors in it, stacked along dim 0; rows after the last are padding.
        stage: the index of its stage among those of this pipeline rank.
        tied: whether another pipeline rank holds a copy (tied embeddings), so that the gradients are summed.
        shared_by: the name of the ranks that share its states; see `TensorFamily`.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stage: int = 0
    tied: bool = False
    shared_by: str = "dense"

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
        return TensorFamily(self.shared_by, self.pieces[0].tensor.states)

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates the parameter."""
        return self.pieces[0].tensor.trainable

    @property
    def sharded(self) -> bool:
        """Whether data ranks hold a part of it each at ZeRO stage 3; see `TensorSpec`."""
        return self.pieces[0].tensor.sharded


def local_params(table: Table, layout: Layout, rank: int) -> tuple[LocalParam, ...]:
    """Returns the parameters that a rank holds, in the table's order.

    They depend on its place in the pipeline and among the ranks that cut tensors, and on its part of the experts. A
    tied tensor is a parameter of its own only if its original is on another pipeline rank.

    Raises:
        ParallelError: the layout does not fit the table, or a fused parameter is frozen in part.
    """
    return next(params_of_ranks(table, layout, (rank,)))


def params_of_ranks(table: Table, layout: Layout, ranks: Iterable[int]) -> Iterator[tuple[LocalParam, ...]]:
    """Yields the parameters of each rank, as `local_params`, of a table that may have 100,000 tensors."""
    of_ranks = stages(table, layout)
    stage_of = [{layer: number for number, stage in enumerate(held) for layer in stage.places} for held in of_ranks]
    rank_of = {layer: pp for pp, layers in enumerate(stage_of) for layer in layers}
    on_rank: list[list[TensorSpec]] = [[] for _ in of_ranks]
    for spec in table:
        on_rank[rank_of[spec.layer]].append(spec)
    tied = {name for spec in table if spec.alias and layout.pp > 1 for name in (spec.name, spec.alias)}
    count = num_experts(table)
    for rank in ranks:
        pp, held = layout.coordinates(rank).pp, experts_of(count, layout.experts, rank)
        specs = [spec for spec in on_rank[pp] if spec.expert is None or spec.expert in held]
        yield tuple(_rank_params(specs, layout, rank, stage_of[pp], tied))


def _rank_params(
    held: Sequence[TensorSpec], layout: Layout, rank: int, stage_of: Mapping[int | str, int], tied: Collection[str]
) -> Iterator[LocalParam]:
    """Yields the parameters of a rank that holds these tensors; `stage_of` has the stages of its layers."""
    dense, experts = layout.dense, layout.experts
    family = "dense" if experts == dense else "experts"
    names = {spec.name for spec in held}
    members: dict[str, list[TensorSpec]] = {}
    for spec in held:
        if spec.alias not in names:
            members.setdefault(spec.param or spec.name, []).append(spec)
    for name, specs in members.items():
        first = specs[0]
        yield replace(
            _local_param(name, specs, dense if first.expert is None else experts, rank),
            stage=stage_of[first.layer],
            tied=first.name in tied,
            shared_by="dense" if first.expert is None else family,
        )


def experts_of(count: int, spread: Spread, rank: int) -> range:
    """Returns the numbers of the experts, of `count` in each layer, that a rank holds: consecutive, as many as others.

    Raises:
        ParallelError: ep does not divide the number of experts.
    """
    if count % spread.ep:
        raise ParallelError(
            f"num_experts % ep = {count} % {spread.ep} = {count % spread.ep}, and it must be 0: every rank holds as "
            f"many experts as the others. Use a divisor of {count} as ep."
        )
    ep, size = spread.place(rank).ep, count // spread.ep
    return range(ep * size, (ep + 1) * size)


def _local_param(name: str, specs: list[TensorSpec], spread: Spread, rank: int) -> LocalParam:
    pieces: list[Piece] = []
    start, tp, tp_rank = 0, spread.tp, spread.place(rank).tp
    for spec in specs:
        for box in split_boxes(spec, tp, tp_rank):
            pieces.append(Piece(spec, box, start, is_owner(spec, tp, tp_rank), num_holders(spec, tp)))
            start += box.size
    first = specs[0]
    if len({spec.trainable for spec in specs}) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise ParallelError(f"The module fuses {names} into one parameter, {name}: freeze all of them or none.")
    assert all(spec.states == first.states for spec in specs), f"{name} fuses tensors of different slots"
    assert len({spec.expert is None for spec in specs}) == 1, f"{name} fuses tensors of experts and others"
    shape = list(pieces[0].box.shape)
    if len(pieces) > 1:
        shape[0] = sum(piece.box.shape[0] for piece in pieces)
    elif first.split and first.split.rule == "pad":
        if first.split.dim != 0:
            raise ParallelError(f"{first.name}: tk pads dim 0 only, not dim {first.split.dim}.")
        shape[0] = ceil_div(first.shape[0], tp)
    return LocalParam(name, tuple(shape), tuple(pieces))
