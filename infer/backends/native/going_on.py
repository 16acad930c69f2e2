"""The arguments with which kernels go on without the worker, and the memory that these point to."""

from ctypes import addressof, create_string_buffer

import numpy as np

from ...sampling.block import SamplingBatch
from ...scheduling.step_plan import SamplerOutput
from ..backend import EngineLine
from .structures import StepExchange


class GoingOn:
    """The arguments of `Kernels.go_on`.

    Args:
        line: the rank's socket to the engine.
        num_rows: the number of rows of a step.
        batch: the sampler's block, where results are found, and numbers of tokens are advanced.

    Attributes:
        structure: the arguments as C reads them, as long as this object lives.
    """

    def __init__(self, line: EngineLine, num_rows: int, batch: SamplingBatch) -> None:
        empty = SamplerOutput.of_tokens(np.zeros(num_rows, np.int32), np.zeros(num_rows, np.uint8))
        answer = line.encode(empty)
        self._answer = create_string_buffer(answer, len(answer))
        self._next_step = create_string_buffer(line.next_step, len(line.next_step))
        self.structure = StepExchange(
            descriptor=line.descriptor,
            answers=line.answers,
            next_step=addressof(self._next_step),
            next_step_bytes=len(line.next_step),
            answer=addressof(self._answer),
            answer_bytes=len(answer),
            sampled=batch.token_ids,
            finite=batch.finite,
            numbers=batch.new_number,
        )
