"""A rank's positions of the rows of a micro-batch, with the attention over the rows' keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.labels import IGNORED
from ...data.batches import MicroBatch
from ...model.attention import Attend
from ...parallel.mesh import ALONE, Group
from ..context.dealing import Dealing, deal
from ..context.gather import GatheredAttention
from ..context.modes import Mode
from ..context.ulysses import UlyssesAttention
from .attention import attention_within
from .gpu_attention import GpuFacts

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class RowsPart:
    """The positions of a micro-batch's rows that a rank computes.

    Attributes:
        inputs: int64 [rows, positions].
        targets: int64 [rows, positions], the token after each input in the whole row, or IGNORED.
        positions: int64 [rows, positions], the place of each input in its document.
        attend: the attention over the keys of the rows.
        counted: bool [rows, positions], those that are neither in a row without any target nor beyond a row's end.
        places: int64 [rows, positions], the place of each input in its row; None if the rows are whole.
        cp: the ranks that compute the rows' other positions.
    """

    inputs: Integers
    targets: Integers
    positions: Integers
    attend: Attend
    counted: NDArray[np.bool_]
    places: Integers | None = None
    cp: Group = ALONE


class Rows(Protocol):
    """Takes a rank's part of micro-batches."""

    def part(self, micro: MicroBatch) -> RowsPart:
        """Returns this rank's part of a micro-batch."""


class WholeRows:
    """Takes all positions: there is no context parallelism.

    Args:
        gpu: the GPU that computes; None for a CPU.
    """

    def __init__(self, gpu: GpuFacts | None = None) -> None:
        self._gpu = gpu

    def part(self, micro: MicroBatch) -> RowsPart:
        """Returns the whole micro-batch."""
        attend = attention_within(micro.documents, self._gpu)
        return RowsPart(micro.inputs, micro.targets, micro.positions, attend, _real_rows(micro))


WHOLE_ROWS = WholeRows()


class DealtRows:
    """Takes the positions that are dealt to a context-parallel rank.

    Args:
        cp: the context-parallel ranks, more than one.
        mode: how attention gets the keys of other ranks.
        windows: the attention window of each layer of the whole model; None for no window.
        multiple: the number that must divide each rank's number of positions of a row.
    """

    def __init__(self, cp: Group, mode: Mode, windows: Sequence[int | None], multiple: int) -> None:
        self._cp, self._windows, self._multiple = cp, windows, multiple
        self._attention = GatheredAttention if mode == "gather" else UlyssesAttention
        self._last: tuple[object, Dealing, Attend] | None = None

    def part(self, micro: MicroBatch) -> RowsPart:
        """Returns this rank's positions of a micro-batch. Only their ends are padded, with tokens that do not count."""
        dealing, attend = self._dealt(micro)
        rank = self._cp.rank
        places = np.broadcast_to(np.arange(micro.inputs.shape[1]), micro.inputs.shape)
        return RowsPart(
            dealing.take(rank, micro.inputs, 0),
            dealing.take(rank, micro.targets, IGNORED),
            dealing.take(rank, micro.positions, 0),
            attend,
            dealing.take(rank, _real_rows(micro).astype(np.int64), 0).astype(np.bool_),
            dealing.take(rank, places, 0),
            self._cp,
        )

    def _dealt(self, micro: MicroBatch) -> tuple[Dealing, Attend]:
        """Returns the deal of a micro-batch and its attention: those of the last one if the rows are cut alike."""
        cut = (micro.inputs.shape, micro.documents)
        last = self._last  # another thread may deal other rows
        if last is None or last[0] != cut:
            rows, length = micro.inputs.shape
            dealing = deal(rows, length, micro.documents, self._windows, self._cp.size, self._multiple)
            last = self._last = (cut, dealing, self._attention(dealing, self._cp))
        return last[1], last[2]


def _real_rows(micro: MicroBatch) -> NDArray[np.bool_]:
    """Returns whether each position is in a row with a target: bool [rows, positions]."""
    real: NDArray[np.bool_] = (micro.targets != IGNORED).any(axis=1, keepdims=True)
    return real.repeat(micro.targets.shape[1], axis=1)
