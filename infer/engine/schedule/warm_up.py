"""The steps that an engine measures before its first request, to know the cost of steps.

They compute tokens of no request, in blocks that no request holds: later steps overwrite the values there.
"""

from typing import Final

from ....core.integers import ceil_div
from ..request.request import Request
from ..request.sampling_params import SamplingParams
from .samples.block_table import BlockTable
from .samples.sample import Output, Sample, ScheduledChunk
from .waiting.limits import Limits

_MAX_CONTEXT: Final = 2048  # tokens; the warm-up must be short
_MAX_CHUNK: Final = 256
_ROWS: Final = (*range(1, 10), 12, 16, 24, 32, 48)
_ROW_CONTEXT: Final = 256  # tokens


def warm_up_chunks(limits: Limits, num_blocks: int, block_size: int, num_twins: int = 0) -> list[ScheduledChunk]:
    """Returns the steps to measure, one chunk each: few and many tokens, after short and long contexts.

    Args:
        limits: the limits on steps and samples, which the chunks keep.
        num_blocks: the number of blocks of the cache, all of them free.
        block_size: the number of tokens of a block.
        num_twins: see `BlockAllocator`; blocks that are written have twins, so that none is written to twin 0.
    """
    context = min(limits.max_model_len, num_blocks * block_size, _MAX_CONTEXT)
    longest = min(limits.max_batched_tokens, context, _MAX_CHUNK)
    short = max(1, longest // 4)
    places = ((0, 1), (0, short), (0, longest), (context - 1, 1), (context - short, short))
    return [_chunk(start, length, block_size, num_twins) for start, length in dict.fromkeys(places)]


def row_chunks(limits: Limits, num_blocks: int, block_size: int, num_twins: int = 0) -> list[ScheduledChunk]:
    """Returns the steps to measure that have a row of logits for each token, as decoding does: few and more tokens.

    Each is one token and proposals behind it. The arguments are those of `warm_up_chunks`.
    """
    context = min(limits.max_model_len, num_blocks * block_size, _ROW_CONTEXT)
    lengths = [length for length in _ROWS if length <= min(limits.max_batched_tokens, context)]
    return [_chunk(context - length, length, block_size, num_twins, length - 1) for length in lengths]


def _chunk(start: int, length: int, block_size: int, num_twins: int, num_proposals: int = 0) -> ScheduledChunk:
    num_tokens = start + length
    blocks = list(range(1, ceil_div(num_tokens, block_size) + 1))
    written = blocks[start // block_size :] if num_twins else []
    sample = Sample(
        Request((0,) * (num_tokens - num_proposals), SamplingParams(temperature=0.0)),
        index=0,
        arrival=0,
        seed=0,
        output=Output(num_tokens + 1),
        table=BlockTable(blocks=blocks, twins=[number for pair in enumerate(written, 1) for number in reversed(pair)]),
    )
    return ScheduledChunk(sample, start, length, (0,) * num_proposals)
