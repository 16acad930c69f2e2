"""The products of tokens with the weights of their experts, always 16 rows at a time, padded.

So a token's bits do not depend on the others. On a CPU each expert gets as many tiles as it needs. On a GPU the host
would wait for that number: it takes as many tiles as there could be at most, and gathers the weights of their experts.

Letters: P pairs of a token and one of its experts, sorted by expert; N tiles of R = 16 pairs; T tokens; D hidden size;
I intermediate size of an expert on this rank, F = 2 I; E experts; S slices of I; X = S D sums, each of a slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F

from .....model.activation import swiglu
from .....parallel.coded_weight import CodedWeight
from .....parallel.products import linear
from ...program.operations import RunExperts
from .adapted_products import AdaptedRange, PreparedAdapter, add_of_expert
from .row_tiles import SMALLEST

ExpertRows: TypeAlias = torch.Tensor | CodedWeight  # the weights of all experts, one below the other
_MOST_VALUES: Final = 2**24  # of weights that a GPU gathers at a time


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts.

    Attributes:
        gate_up, down: those of all experts, one below the other: [E * F, D] and [E * D, I].
        operation: their names and sizes.
    """

    gate_up: ExpertRows
    down: ExpertRows
    operation: RunExperts

    def of_expert(self, expert: int, hidden: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns an expert's gate and up [F, D], and the S slices of its down, each [D, I / S]."""
        inner = 2 * self.operation.inner
        down_DI = self.down[slice(expert * hidden, (expert + 1) * hidden)]
        gate_up_FD = self.gate_up[slice(expert * inner, (expert + 1) * inner)]
        return gate_up_FD, down_DI.chunk(self.operation.num_slices, dim=-1)

    def gathered(self, expert_N: torch.Tensor, hidden: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns the same of N experts, [N, F, D] and [N, D, I / S], whose numbers are on the device."""
        gate_up_NFD = _gather(self.gate_up, expert_N, 2 * self.operation.inner)
        return gate_up_NFD, _gather(self.down, expert_N, hidden).chunk(self.operation.num_slices, dim=-1)


def of_expert(x_TD: torch.Tensor, expert: int, weights: ExpertWeights, adapted: Sequence[AdaptedRange]) -> torch.Tensor:
    """Maps one expert's tokens to its outputs, [T, X].

    Args:
        x_TD: the tokens.
        expert: the expert's number.
        weights: the weights of all experts.
        adapted: the tokens with an adapter.
    """
    gate_up_FD, slices = weights.of_expert(expert, x_TD.shape[1])
    return _of_expert(x_TD, gate_up_FD, slices, _Adapters(weights.operation, expert, adapted))


def by_tiles(
    x_PD: torch.Tensor, ends_E: torch.Tensor, weights: ExpertWeights, adapter: PreparedAdapter | None
) -> torch.Tensor:
    """Maps pairs to the outputs of their experts, [P, X], without a wait for the device.

    Args:
        x_PD: the token of each pair.
        ends_E: int32, the end of each expert's pairs.
        weights: the weights of all experts.
        adapter: that of all tokens; None without one.
    """
    (num_pairs, hidden), operation = x_PD.shape, weights.operation
    expert_N, places_NR = _tiles(ends_E, num_pairs)
    x_NRD = F.pad(x_PD, (0, 0, 0, 1))[places_NR]
    found = x_PD.new_empty(num_pairs + 1, operation.num_slices * hidden)  # the last one takes the padding of tiles
    step = 1 if adapter else max(1, _MOST_VALUES // (3 * operation.inner * hidden))
    for x, experts, places in zip(x_NRD.split(step), expert_N.split(step), places_NR.split(step), strict=True):
        gate_up, slices = weights.gathered(experts, hidden)
        if adapter is None:
            y_NRX = _tiles_of_experts(x, gate_up, slices)
        else:
            own = _Adapters(operation, experts, [AdaptedRange(slice(0, SMALLEST), adapter)])
            y_NRX = _of_expert(x[0], gate_up[0], tuple(each[0] for each in slices), own)
        found.index_copy_(0, places.flatten(), y_NRX.view(-1, found.shape[1]))
    return found[:-1]


def _tiles(ends_E: torch.Tensor, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the expert of each tile, [N], and the places of its pairs, [N, R], which are P in padding.

    N is the most tiles that so many pairs can fill: all experts but a few have one that is not full.
    """
    most = min(len(ends_E), num_pairs)
    tile_N = torch.arange(most + (num_pairs - most) // SMALLEST, device=ends_E.device)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    last_E = ((counts_E + SMALLEST - 1) // SMALLEST).cumsum(0)
    expert_N = torch.searchsorted(last_E, tile_N, right=True).clamp_max(len(ends_E) - 1)
    end_N = ends_E[expert_N].long()
    # the end of an expert's last tile, if it were full, less the tiles from this one on
    whole_N = (counts_E[expert_N] + SMALLEST - 1) // SMALLEST
    first_N = end_N - counts_E[expert_N] + (tile_N - last_E[expert_N] + whole_N) * SMALLEST
    places_NR = first_N.unsqueeze(-1) + torch.arange(SMALLEST, device=ends_E.device)
    return expert_N, places_NR.where(places_NR < end_N.unsqueeze(-1), num_pairs)


def _gather(rows: ExpertRows, expert_N: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the rows of some experts, [N, size, columns], of those of all, `size` each."""
    if isinstance(rows, torch.Tensor):
        return torch.index_select(rows.unflatten(0, (-1, size)), 0, expert_N)
    numbers = expert_N.unsqueeze(-1) * size + torch.arange(size, device=expert_N.device)
    widened = rows[numbers.flatten()]
    return widened.view(-1, size, widened.shape[-1])


def _tiles_of_experts(
    x_NRD: torch.Tensor, gate_up_NFD: torch.Tensor, down_slices: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Maps tiles to the sums of all slices, [N, R, X]."""
    gated_NRI = swiglu(torch.bmm(x_NRD, gate_up_NFD.mT))
    parts = zip(gated_NRI.chunk(len(down_slices), dim=-1), down_slices, strict=True)
    return torch.cat([torch.bmm(part, weight.mT) for part, weight in parts], dim=-1)


@dataclass(frozen=True, slots=True)
class _Adapters:
    """The adapters of one expert, an int or int64 [1] on the device, and the rows among its own that have one."""

    operation: RunExperts
    expert: int | torch.Tensor
    ranges: Sequence[AdaptedRange]


def _of_expert(
    x_TD: torch.Tensor, gate_up_FD: torch.Tensor, down_slices: tuple[torch.Tensor, ...], own: _Adapters
) -> torch.Tensor:
    """Maps one expert's tokens [T, D] to the sums of all slices, [T, X]."""
    tiles = F.pad(x_TD, (0, 0, 0, -len(x_TD) % SMALLEST)).split(SMALLEST)
    inner_TF = torch.cat([linear(tile_TD, gate_up_FD) for tile_TD in tiles])
    add_of_expert(own.operation.gate_up, own.expert, [inner_TF], x_TD, [gate_up_FD], own.ranges)
    gated_TI = torch.cat([swiglu(tile_TF) for tile_TF in inner_TF.split(SMALLEST)])
    slices = zip(gated_TI.chunk(len(down_slices), dim=-1), down_slices, strict=True)
    sums = [torch.cat([linear(x, weight) for x in part.split(SMALLEST)]) for part, weight in slices]
    add_of_expert(own.operation.down, own.expert, sums, gated_TI, down_slices, own.ranges)
    return torch.cat(sums, dim=-1)[: len(x_TD)]
