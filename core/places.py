"""The places of a rank, as pure functions of its number: in the mesh, and among the ranks that hold a kind of tensors.

The ranks of one pipeline stage are numbered in two ways, each with tp as the fastest axis:

    tensors that every token uses    data x tp, where data = dp x cp
    tensors of single experts        edp x ep x expert_tp
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's coordinates in the mesh: its number along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place among the ranks of its pipeline stage that hold one kind of tensors; see `Spread`.

    Attributes:
        data: its number among the ranks that hold the same tensors.
        ep: the number of its part of the experts.
        tp: its number among the ranks that cut a tensor.
        member: its number among the ranks that share its copy of the optimizer state.
        copy: the number of its copy among all of them.
    """

    data: int
    ep: int
    tp: int
    member: int
    copy: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How the ranks of one pipeline stage, data x ep x tp of them, hold one kind of tensors.

    Attributes:
        data: the number of ranks that hold the same tensors.
        ep: the number of parts into which the experts are dealt; 1 for tensors that every token uses.
        tp: the number of ranks that cut a tensor.
        group_size: the number of ranks, neighbours along data, that share one copy of the optimizer state.
    """

    data: int
    ep: int
    tp: int
    group_size: int

    @property
    def num_copies(self) -> int:
        """The number of copies of the optimizer state."""
        return self.data // self.group_size

    def place(self, rank: int) -> RankPlace:
        """Returns the place of a rank, of which only the number within its stage counts."""
        data = rank // (self.tp * self.ep) % self.data
        return RankPlace(
            data=data,
            ep=rank // self.tp % self.ep,
            tp=rank % self.tp,
            member=data % self.group_size,
            copy=data // self.group_size,
        )
