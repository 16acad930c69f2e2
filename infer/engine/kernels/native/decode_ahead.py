"""The plan of a step in the hands of the kernels, and what they need to decode ahead: to go on with it without Python.

C reads the plan's arrays in place, and while it decodes ahead it advances them: see c/decode_ahead.h, which reads and
writes the frames of step/channel.py.
"""

from collections.abc import Sequence
from ctypes import POINTER, addressof, c_int32, cast
from dataclasses import dataclass
from typing import Final

import numpy as np

from .....core.casts import Array
from ...step.channel import HEADER, NEXT_STEP, Channel, masks_frame, result_frame, tokens_frame
from ...step.running_plan import RunningPlan
from ...step.sampler_output import NUM_CANDIDATES, SamplerOutput
from ...step.sampling_rows import SamplingRows
from ..sampler.block import OPTIONS, SamplingBatch
from .binding.structures import EngineChannel, NativeModel, RowOption, StepArrays

_NO_MASKS: Final = np.empty((0, 0), np.uint32)
_NUMBERED: Final = dict.fromkeys(("new_number", "mask"))  # options that C sets by itself, and so knows by their place
_FRAME_BYTES: Final = 64  # of a row, in the frames that C takes: its span, its tokens, and new blocks
_NEW_BLOCKS: Final = 16  # of a span, for which C has room while it decodes ahead


@dataclass(frozen=True, slots=True)
class AssignedPlan:
    """The plan that the kernels read.

    Attributes:
        generation: its generation (see `RunningPlan`).
        arrays: the arrays that must live as long as they read it.
    """

    generation: int
    rows: SamplingRows
    arrays: Sequence[Array]


def assign(plan: RunningPlan, model: NativeModel) -> AssignedPlan:
    """Points a model to the arrays of a plan."""
    advancing = (plan.tokens, plan.positions, plan.slots, plan.rows.new_number)
    assert all(each.flags.c_contiguous for each in advancing), "C advances the arrays of the plan, not copies"
    num_spans, num_tokens = len(plan.span_length), len(plan.tokens)
    num_blocks = plan.block_tables.shape[1]
    tables = np.zeros((num_spans, num_blocks + _NEW_BLOCKS), np.int32)
    tables[:, :num_blocks] = plan.block_tables
    spans = np.zeros((num_spans, 4), np.int32)
    spans[:, 0], spans[:, 1] = np.cumsum(plan.span_length) - plan.span_length, plan.span_length
    spans[:, 3] = np.arange(num_spans) * tables.shape[1]
    row_tokens = np.ascontiguousarray(plan.rows.token, np.int32)
    adapted, adapter_of = np.ascontiguousarray(plan.adapter_rows), plan.adapter_of
    arrays = [*advancing[:3], spans, tables, row_tokens, np.empty(num_tokens, np.int32), adapted]
    places = (each.ctypes.data for each in arrays)
    model.step = StepArrays(num_tokens, num_spans, len(plan.rows), 0, *places, len(adapted))
    model.step.table_blocks = tables.shape[1]
    if len(adapted):
        model.step.adapter_of = adapter_of.ctypes.data
    return AssignedPlan(plan.generation, plan.rows, [*arrays, adapter_of])


class EngineExchange:
    """What C reads from the engine and sends to it: the arguments of `Kernels.decode_ahead`, and of steps that answer.

    Args:
        channel: the rank's socket to the engine.
        batch: the sampler's block, with the options and results of rows.
        capacity: the largest number of rows of a block.

    Attributes:
        channel: that socket.
        arguments: the arguments as C reads them, as long as this object lives.
    """

    def __init__(self, channel: Channel, batch: SamplingBatch, capacity: int) -> None:
        none = np.empty(0, np.int32)
        result = result_frame(SamplerOutput.of_tokens(none, none.astype(np.uint8))).encode()
        room = bytes(capacity * (4 + 1 + 4 * NUM_CANDIDATES))
        self.channel = channel
        self._result = np.frombuffer(bytearray(result + room), np.uint8)
        self._frame: Array = np.zeros(len(NEXT_STEP) + _FRAME_BYTES * capacity, np.uint8)
        self._added: Array = np.zeros((_NEW_BLOCKS * capacity, 2), np.int32)
        self._given: Array = np.zeros((len(EngineChannel().given), capacity), np.int32)
        self._columns = {name: np.zeros((2, capacity), OPTIONS[name]) for name in {**_NUMBERED, **OPTIONS}}
        self._options = (RowOption * len(OPTIONS))(
            *(
                RowOption(batch.address_of(name), *(each.ctypes.data for each in column), column.itemsize)
                for name, column in self._columns.items()
            )
        )
        self.arguments = EngineChannel(
            descriptor=channel.connection.fileno(),
            answers=channel.answers,
            result=self._result.ctypes.data,
            sampled=batch.token_ids,
            finite=batch.finite,
            candidates=batch.candidates,
            masks=batch.address_of("masks"),
            mask_stride=batch.address_of("mask_stride"),
            frame=self._frame.ctypes.data,
            frame_bytes=self._frame.nbytes,
            added=self._added.ctypes.data,
            most_added=len(self._added),
            waits=channel.waits,
            capacity=capacity,
            num_options=len(OPTIONS),
            options=addressof(self._options),
        )
        self.arguments.given[:] = [each.ctypes.data for each in self._given]
        self.arguments.next_step[:] = NEXT_STEP
        self.arguments.tokens[:] = tokens_frame(none).encode()
        self.arguments.again[:] = masks_frame(_NO_MASKS, none).encode()[: HEADER.size - 4]  # up to the body's size

    def assign(self, batch: SamplingBatch, have_candidates: bool) -> None:
        """Points to the rows that the block has now, of which the engine may choose the tokens among candidates."""
        self.arguments.numbers, self.arguments.mask = batch.new_number, batch.mask
        self.arguments.num_candidates = NUM_CANDIDATES * have_candidates

    @property
    def address(self) -> int:
        """The address of the arguments, for `NativeModel.channel`."""
        return addressof(self.arguments)

    def newest(self, model: NativeModel, tokens: Array) -> Array | None:
        """Returns what `DecodedAhead` has of the last call, whose last step chose these tokens."""
        num_spans = model.step.spans
        if not self.arguments.has_left:
            return None
        if model.step.tokens != num_spans:
            return np.empty((0, 3), np.int32)
        numbers = np.ctypeslib.as_array(cast(self.arguments.numbers, POINTER(c_int32)), (num_spans,))
        return np.stack([self._given[1, :num_spans], numbers, tokens], axis=1)

    @property
    def new_blocks(self) -> Array:
        """The new blocks of the last call, as `DecodedAhead` has them: int32 [.., 2]."""
        return self._added[: self.arguments.num_added].copy()
