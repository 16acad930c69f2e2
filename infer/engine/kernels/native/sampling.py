"""The sampler of a rank: it runs within the kernels' step, on their threads, each rank on its share of the rows."""

from ctypes import addressof, c_void_p, cast

from ...step.step_plan import NO_LOGPROBS, Array, SamplerOutput, SamplingRows
from ..engine_line import EngineLine
from ..sampler.block import SamplingBlock, most_alternatives
from ..sampler.native_sampler import NativeSampler
from .binding.memory import lazy
from .binding.structures import Sampling
from .going_on import GoingOn
from .state import State


class StepSampler:
    """The sampler in C with its arguments, and its results in memory that all ranks read.

    Args:
        sampler: the functions.
        state: the rank's buffers.
        vocab: the number of tokens of the vocabulary.
        threads: the number of threads of the rank.
    """

    def __init__(self, sampler: NativeSampler, state: State, vocab: int, threads: int) -> None:
        self._block = SamplingBlock(state.max_head_rows, vocab, results=state.results)
        logits = state.logits
        self._block.batch.logits, self._block.batch.row_stride = logits.ctypes.data, logits[0].size
        scratch_bytes = sampler.scratch_bytes(vocab)
        self._scratch: Array = lazy(threads * scratch_bytes)
        self._sampler = sampler  # its library stays loaded
        self._rows: SamplingRows | None = None  # those that the block has, without masks
        self._most, self._are_asked = 0, False  # the alternatives of them; whether one has candidates
        self._arguments = Sampling(
            rows=cast(sampler.sample_rows, c_void_p).value,
            batch=addressof(self._block.batch),
            scratch=self._scratch.ctypes.data,
            scratch_bytes=scratch_bytes,
        )

    @property
    def address(self) -> int:
        """The address of the arguments, for `NativeModel.sampling`."""
        return addressof(self._arguments)

    def prepare(self, rows: SamplingRows, masks: Array | None = None, again: bool = False) -> None:
        """Sets the options of the rows that the next call of the kernels samples, and the masks that they number.

        The rows of the step before may have advanced (see `StepPlan`).

        Args:
            again: whether they were sampled before.
        """
        self._arguments.again = again
        if rows is self._rows and masks is None:
            self._block.advance(rows.new_number)
            return
        self._block.fill(rows, masks)
        self._rows, self._most = rows if masks is None else None, most_alternatives(rows)
        self._are_asked = rows.are_asked

    def going_on(self, line: EngineLine, rows: SamplingRows) -> GoingOn | None:
        """Returns the arguments with which kernels sample further tokens of the rows.

        None, if they were not prepared last, or have a mask, or request log-probabilities.
        """
        if rows is not self._rows or self._most != NO_LOGPROBS:
            return None
        return GoingOn(line, len(rows), self._block.batch, self._are_asked)

    def output(self, rows: SamplingRows) -> SamplerOutput:
        """Returns the samples of the rows that were prepared last, those of other ranks included."""
        return self._block.output(len(rows), self._most, self._are_asked)
