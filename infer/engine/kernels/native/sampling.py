"""The sampler of a rank: it runs within the kernels' step, on their threads, each rank on its share of the rows."""

from ctypes import addressof, c_void_p, cast

from .....core.casts import Array
from ...step.channel import Channel
from ...step.running_plan import RunningPlan
from ...step.sampler_output import SamplerOutput
from ...step.sampling_rows import NO_LOGPROBS, SamplingRows
from ..sampler.block import SamplingBlock, most_alternatives, scratch_bytes
from ..sampler.native_sampler import NativeSampler
from .binding.memory import lazy
from .binding.structures import Sampling
from .buffers import RankBuffers
from .decode_ahead import EngineExchange


class StepSampler:
    """The sampler in C with its arguments, and its results in memory that all ranks read.

    Args:
        sampler: the functions.
        buffers: the rank's buffers.
        vocab: the number of tokens of the vocabulary.
        threads: the number of threads of the rank.
    """

    def __init__(self, sampler: NativeSampler, buffers: RankBuffers, vocab: int, threads: int) -> None:
        logits, per_thread = buffers.logits, scratch_bytes(vocab)
        self._block = SamplingBlock(len(logits), vocab, results=buffers.results)
        self._block.batch.logits, self._block.batch.row_stride = logits.ctypes.data, logits[0].size
        self._scratch: Array = lazy(threads * per_thread)
        self._sampler = sampler  # its library stays loaded
        self._generation = 0  # of the plan all rows of which the block has, without masks; 0: it has others
        self._most, self._have_candidates = 0, False  # the alternatives of its rows; whether one has candidates
        self._exchange: EngineExchange | None = None
        self._arguments = Sampling(
            rows=cast(sampler.sample_rows, c_void_p).value,
            batch=addressof(self._block.batch),
            scratch=self._scratch.ctypes.data,
            scratch_bytes=per_thread,
        )

    @property
    def address(self) -> int:
        """The address of the arguments, for `NativeModel.sampling`."""
        return addressof(self._arguments)

    def prepare(self, rows: SamplingRows, generation: int = 0, masks: Array | None = None, again: bool = False) -> None:
        """Points to the rows that the next call of the kernels samples, and to the masks that they number.

        Args:
            generation: that of the plan, if these are all of its rows, and have no masks.
            again: whether they were sampled before.
        """
        self._arguments.again = again
        if generation and generation == self._generation:
            return
        self._block.fill(rows, masks)
        self._generation = generation
        self._most, self._have_candidates = most_alternatives(rows), rows.have_candidates

    def exchange(self, channel: Channel) -> EngineExchange | None:
        """Returns the arguments with which kernels send the results of the rows that were prepared last.

        None, if these request log-probabilities.
        """
        if self._most != NO_LOGPROBS:
            return None
        if self._exchange is None or self._exchange.channel is not channel:
            self._exchange = EngineExchange(channel, self._block.batch, self._block.capacity)
        self._exchange.assign(self._block.batch, self._have_candidates)
        return self._exchange

    def decode_ahead(self, plan: RunningPlan, channel: Channel) -> EngineExchange | None:
        """Returns the arguments with which kernels sample further tokens of the rows of a plan.

        None, if these were not prepared last, or have a mask, or request log-probabilities.
        """
        return self.exchange(channel) if plan.generation and plan.generation == self._generation else None

    def output(self, rows: SamplingRows) -> SamplerOutput:
        """Returns the samples of the rows that were prepared last, those of other ranks included."""
        return self._block.output(len(rows), self._most, self._have_candidates)

    def tokens(self, count: int) -> Array:
        """Returns the tokens that so many rows chose last: int32 [count]."""
        return self._block.output(count, NO_LOGPROBS).token_ids
