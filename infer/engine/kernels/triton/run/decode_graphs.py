"""Steps of single tokens as graphs, one per bucket of rows, which leave the device ready for the step that follows.

A graph ends with the tokens of its step in the columns of the next one, so a step that merely follows the one before
needs nothing from the host. n are the rows of a bucket.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ......core.casts import Array
from ....step.running_plan import RunningPlan
from ..step.buckets import bucket_of
from ..step.device_tables import DecodeTables, RowOptions, StepOnDevice, send_columns
from ..step.step_adapters import StepAdapters
from ..step.step_columns import DECODE_COLUMNS, decode_columns
from .decoder import GpuDecoder
from .device_adapters import DeviceAdapters
from .graphs import Recorder, Replay
from .kernels import GpuKernels

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph of a bucket.

    Attributes:
        replay: computes a step.
        result: its tokens and finite flags, int32 [2, n].
    """

    replay: Replay
    result: torch.Tensor


@dataclass(frozen=True, slots=True)
class _NextStep:
    """The step that the device is ready for: that after the last one.

    Attributes:
        generation, positions: those of its plan.
    """

    generation: int
    positions: Array


class DecodeGraphs:
    """The graphs of a rank, captured at its start.

    Args:
        decoder: what they compute.
        kernels: the decoder's kernels.
        sizes: the buckets, ascending.
        tables: the memory that they read.
        logits: the memory of their logits, fp32 [rows of the largest bucket, vocab_size].
        recorder: what captures.
        adapters: the slots of adapters; None without any. With slots each bucket has two graphs: steps without a row
            with an adapter are as in an engine without slots.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        kernels: GpuKernels,
        sizes: Sequence[int],
        tables: DecodeTables,
        logits: torch.Tensor,
        recorder: Recorder,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._decoder, self._kernels = decoder, kernels
        self._tables, self._logits, self._sizes = tables, logits, tuple(sizes)
        self._expected: _NextStep | None = None
        # The largest first: the memory of others fits into what it has left in the pool.
        kinds = (False,) if adapters is None else (True, False)
        self._graphs = {
            (size, adapted): self._capture(size, adapted, recorder)
            for size in reversed(self._sizes)
            for adapted in kinds
        }
        _LOG.info("Graphs for up to %d rows are captured.", self._sizes[-1])

    def takes(self, plan: RunningPlan) -> bool:
        """Returns whether there is a graph for a plan: none has heads of adapters."""
        if self._adapters is not None and any(map(self._adapters.has_head, plan.adapters.tolist())):
            return False
        return plan.can_advance and len(plan.tokens) > 0 and bucket_of(len(plan.tokens), self._sizes) is not None

    def start(self, plan: RunningPlan, known: Array | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts a plan's step; returns its logits and results, for its rows alone, which the next step overwrites.

        Args:
            known: the tokens that the device has for the step; None if a copy must bring all columns.
        """
        if known is None or not self._is_expected(plan) or not np.array_equal(known, plan.tokens):
            self._send(plan)
        return self.follow(plan, plan.positions)

    def follow(self, plan: RunningPlan, positions: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts the step at some positions that follows the one before with the tokens on the device: see `start`."""
        rows = len(positions)
        graph = self._graphs[bucket_of(rows, self._sizes) or rows, len(plan.adapters) > 0]
        graph.replay()
        self._expected = _NextStep(plan.generation, positions + np.int32(1))
        return self._logits[:rows], graph.result[:, :rows]

    def _is_expected(self, plan: RunningPlan) -> bool:
        expected = self._expected
        return (
            expected is not None
            and plan.generation == expected.generation > 0
            and np.array_equal(plan.positions, expected.positions)
        )

    def _send(self, plan: RunningPlan) -> None:
        """Brings the columns of a plan to the device, and its tables unless an earlier step has brought them."""
        has_tables = self._expected is not None and plan.generation == self._expected.generation > 0
        size = bucket_of(len(plan.tokens), self._sizes)
        assert size is not None, "a plan that `takes` has refused"
        columns = {"columns": decode_columns(plan, size)}
        if not has_tables:
            columns["tables"] = plan.block_tables
        sent = send_columns(columns, self._tables.device)
        tables = None if has_tables else sent["tables"].view(plan.block_tables.shape)
        self._tables.put(sent["columns"].view(len(DECODE_COLUMNS), size), tables)

    def _capture(self, size: int, adapted: bool, recorder: Recorder) -> _Graph:
        def run() -> torch.Tensor:
            columns, tables = self._tables.columns(size), self._tables.tables(size)
            named = dict(zip(DECODE_COLUMNS, columns.unbind(), strict=True))
            spans = torch.arange(size, dtype=torch.int32, device=columns.device)
            step = StepOnDevice(
                tokens=named["tokens"],
                positions=named["positions"],
                slots=named["slots"],
                firsts=spans,
                starts=named["positions"],
                lengths=(named["positions"] >= 0).int(),
                tables=tables,
                tiles=torch.stack((spans, torch.zeros_like(spans)), dim=1),
                is_decoding=True,
                adapters=StepAdapters.each(named["numbers"]) if adapted else None,
            )
            logits_RV = self._decoder.head(self._decoder.forward(step), self._logits[:size])
            result = self._kernels.sample(logits_RV, RowOptions.of(named))
            self._kernels.advance(columns, tables, result[0])
            return result

        return _Graph(*recorder.record(run))
