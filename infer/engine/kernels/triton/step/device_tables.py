"""The columns of `step_columns.py` on the device: of any step as one copy, of buckets in fixed memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ......core.casts import Array
from ......core.integers import round_up
from ......parallel.streams import sent
from .step_adapters import StepAdapters
from .step_columns import DECODE_COLUMNS, FLOAT_COLUMNS, ROW_COLUMNS

_ALIGNED: Final = 4  # numbers: 16 bytes


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The options of rows that the device samples.

    Attributes:
        columns: ROW_COLUMNS by name, [R] each: options in fp32 or int32, the counters of the noise and the halves of
            the seeds, whose bits are unsigned, in int32.
    """

    columns: Mapping[str, torch.Tensor]

    @staticmethod
    def of(columns: Mapping[str, torch.Tensor]) -> "RowOptions":
        """Returns the options in ROW_COLUMNS of 32 bits."""
        found = {name: columns[name] for name in ROW_COLUMNS}
        return RowOptions(found | {name: found[name].view(torch.float32) for name in FLOAT_COLUMNS})

    def part(self, rows: slice) -> "RowOptions":
        """Returns the options of some rows."""
        return RowOptions({name: each[rows] for name, each in self.columns.items()})


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """The tokens of a step and their sequences; all tensors are int32.

    Attributes:
        tokens, positions: of each token [T]; padding has the position -1.
        slots: where each key and value goes [T]; -1 nowhere.
        firsts: the first token of each span [S].
        starts: the position of each span's first token [S]; -1 of padding.
        lengths: the number of each span's tokens [S]; 0 of padding.
        tables: the blocks of each sequence [S, W].
        tiles: the tiles of queries: the span of each, and its first token there [Q, 2].
        is_decoding: whether it is a step of a bucket, whose spans have one token each.
        adapters: those of the tokens; None if none has one.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    tiles: torch.Tensor
    is_decoding: bool
    adapters: StepAdapters | None = None


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """Pairs of tokens and experts, sorted by expert.

    Attributes:
        experts: the expert of each pair, ascending, int32 [P].
        ends: the end of each expert's pairs, int32 [E].
    """

    experts: torch.Tensor
    ends: torch.Tensor


def send_columns(columns: Mapping[str, Array], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies columns of 32 bits to a device, all at once, without a wait; returns each as int32, flat.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for each choice of pointers that do not.
    """
    flat = [each.reshape(-1) for each in columns.values()]
    ends = np.cumsum([round_up(len(each), _ALIGNED) for each in flat]).tolist()
    packed = np.zeros(ends[-1], np.int32)
    begins = [0, *ends[:-1]]
    for begin, each in zip(begins, flat, strict=True):
        np.copyto(packed[begin : begin + len(each)], each, casting="no")
    on_device = sent(torch.from_numpy(packed), device)
    parts = (on_device[begin : begin + len(each)] for begin, each in zip(begins, flat, strict=True))
    return dict(zip(columns, parts, strict=True))


class DecodeTables:
    """What steps of single tokens read on the device: the columns of their rows, and the tables of their blocks.

    All buckets share the memory, whose addresses their graphs hold.

    Args:
        most_rows: the rows of the largest bucket.
        most_blocks: the blocks of the longest sequence.
        device: where it lies.
    """

    def __init__(self, most_rows: int, most_blocks: int, device: torch.device) -> None:
        self.device = device
        self._columns = torch.zeros(
            len(DECODE_COLUMNS), round_up(most_rows, _ALIGNED), dtype=torch.int32, device=device
        )
        self._columns[1:3] = -1
        self._tables = torch.zeros(most_rows, most_blocks, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """The bytes of columns and tables."""
        return self._columns.nbytes + self._tables.nbytes

    def columns(self, size: int) -> torch.Tensor:
        """Returns the columns of a bucket, [columns, n]."""
        return self._columns[:, :size]

    def tables(self, size: int) -> torch.Tensor:
        """Returns the tables of a bucket, [n, most blocks]."""
        return self._tables[:size]

    def put(self, columns: torch.Tensor, tables: torch.Tensor | None) -> None:
        """Copies columns [columns, n], and the tables of some of their rows, [S, W]; None leaves those as they are."""
        self._columns[:, : columns.shape[1]].copy_(columns)
        if tables is not None:
            self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
