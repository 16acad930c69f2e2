"""Micro-batches for the stages of a rank: the values that the stages need of each are one tensor, and one copy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...data.batches import MicroBatch
from ...model.attention import Attend
from ...model.decoder import Decoder
from ...model.spec import ExpertsSpec
from ...parallel.mesh import Group
from ...parallel.streams import pinned
from .rows import WHOLE_ROWS, Rows, RowsPart

_ALL: Final = ("inputs", "positions", "targets", "counted", "places")


@dataclass
class PackedRows:
    """A rank's positions of a micro-batch.

    Attributes:
        first_row: the number of the first row in the run.
        num_valid: the number of targets that count, in the whole rows.
        attend: the attention over the rows' keys.
        cp: the ranks that compute the rows' other positions.
        shape: the numbers of rows and of positions.
        names: the names of the values, as in `RowsPart`, that the stages of the rank need.
        values: the values, int64 [names, rows, positions], on the host; pinned if a GPU computes.
    """

    first_row: int
    num_valid: int
    attend: Attend
    cp: Group
    shape: tuple[int, int]
    names: tuple[str, ...]
    values: torch.Tensor
    _there: dict[str, torch.Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns the values by name on a device: each int64 [rows, positions]. Only the first call copies."""
        if not self._there:
            there = self.values.to(device, non_blocking=True)
            self._there = dict(zip(self.names, there.unbind(), strict=True))
        return self._there


class RowPacker:
    """Packs micro-batches for the stages of one rank. A thread may do it.

    Args:
        decoders: the stages.
        device: the device that computes.
        rows: takes this rank's part of micro-batches.
    """

    def __init__(self, decoders: Sequence[Decoder], device: torch.device, rows: Rows = WHOLE_ROWS) -> None:
        self._device, self._rows = device, rows
        ends = [decoder.stage for decoder in decoders]
        blocks = [layer.feed_forward for decoder in decoders for layer in decoder.spec.layers]
        drops = any(adapter.dropout for decoder in decoders for adapter in decoder.spec.adapters.values())
        routes = any(isinstance(block, ExpertsSpec) for block in blocks)
        needed = {
            "inputs": any(stage.first for stage in ends),
            "positions": True,
            "targets": any(stage.last for stage in ends),
            "counted": routes,
            "places": routes or drops,
        }
        self._needed = tuple(name for name in _ALL if needed[name])

    def pack(self, micro_batches: Sequence[MicroBatch]) -> list[PackedRows]:
        """Returns this rank's part of micro-batches."""
        return [self._packed(micro, self._rows.part(micro)) for micro in micro_batches]

    def _packed(self, micro: MicroBatch, part: RowsPart) -> PackedRows:
        names = tuple(name for name in self._needed if getattr(part, name) is not None)
        planes: list[NDArray[np.generic]] = [getattr(part, name) for name in names]
        values = pinned(torch.from_numpy(np.stack(planes, dtype=np.int64)), self._device)
        rows, length = part.inputs.shape
        return PackedRows(micro.first_row, micro.num_valid, part.attend, part.cp, (rows, length), names, values)
