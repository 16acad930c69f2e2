"""The arguments with which kernels go on without the worker, and the memory that these point to."""

from ctypes import addressof, create_string_buffer

import numpy as np

from ...step.step_plan import NUM_CANDIDATES, SamplerOutput
from ..engine_line import EngineLine
from ..sampler.block import SamplingBatch
from .binding.structures import StepExchange


class GoingOn:
    """The arguments of `Kernels.go_on`.

    Args:
        line: the rank's socket to the engine.
        num_rows: the number of rows of a step.
        batch: the sampler's block, where results are found, and numbers of tokens are advanced.
        are_asked: whether rows have candidates.

    Attributes:
        structure: the arguments as C reads them, as long as this object lives.
    """

    def __init__(self, line: EngineLine, num_rows: int, batch: SamplingBatch, are_asked: bool) -> None:
        tokens, num_candidates = np.zeros(num_rows, np.int32), NUM_CANDIDATES * are_asked
        candidates = np.zeros((num_rows, num_candidates), np.int32)
        answer = line.encode(SamplerOutput.of_tokens(tokens, np.zeros(num_rows, np.uint8), candidates))
        chosen = line.encode_tokens(tokens)[: -tokens.nbytes]
        self._answer = create_string_buffer(answer, len(answer))
        self._chosen = create_string_buffer(chosen, len(chosen))
        self._next_step = create_string_buffer(line.next_step, len(line.next_step))
        self._again = create_string_buffer(line.again, len(line.again))
        self.structure = StepExchange(
            descriptor=line.descriptor,
            answers=line.answers,
            next_step=addressof(self._next_step),
            next_step_bytes=len(line.next_step),
            answer=addressof(self._answer),
            answer_bytes=len(answer),
            sampled=batch.token_ids,
            finite=batch.finite,
            candidates=batch.candidates,
            numbers=batch.new_number,
            chosen=addressof(self._chosen),
            chosen_bytes=len(chosen),
            again=addressof(self._again),
            again_bytes=len(line.again),
            mask=batch.mask,
            masks=addressof(batch) + SamplingBatch.masks.offset,
            mask_stride=addressof(batch) + SamplingBatch.mask_stride.offset,
            num_candidates=num_candidates,
        )
