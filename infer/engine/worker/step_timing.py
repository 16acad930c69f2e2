"""The measurement of steps before the first request, from which the scheduler knows the cost of steps.

The steps compute tokens of no request, in blocks that no request holds: later steps overwrite the values there.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from ....core.integers import ceil_div
from ..options import EngineOptions
from ..planning.memory_plan import MemoryPlan
from ..request.request import Request
from ..request.sampling_params import SamplingParams
from ..schedule.batch_writer import BatchWriter
from ..schedule.proposing.proposals import RowCost
from ..schedule.samples.block_table import BlockTable
from ..schedule.samples.sample import Output, Sample, ScheduledChunk
from ..schedule.scheduler import Scheduler
from ..schedule.step_cost import StepSize
from ..schedule.waiting.admission import Limits
from .draft_model import DraftModel
from .worker_group import WorkerGroup

_MAX_CONTEXT: Final = 2048  # tokens; the warm-up must be short
_MAX_CHUNK: Final = 256
_ROWS: Final = (*range(1, 10), 12, 16, 24, 32, 48)
_ROW_CONTEXT: Final = 256  # tokens
_RUNS: Final = 3  # of a number of rows; the fastest one counts
_MOST_SECONDS: Final = 2.0
_LEAST_ROWS: Final = 8  # up to so many are measured however long they take
Measure = Callable[[ScheduledChunk], float]


def measure_steps(
    workers: WorkerGroup, batch: BatchWriter, scheduler: Scheduler, memory: MemoryPlan, options: EngineOptions
) -> None:
    """Measures the duration of those steps of different sizes on which the options make decisions depend.

    Args:
        workers: the loaded workers, on the thread that may use them.
        batch: their slots, none of them in use.
        scheduler: the scheduler, which learns the durations.
        memory: the size of the cache.
        options: the engine's options.

    Raises:
        WorkerDied: see `WorkerGroup.receive`.
    """
    measure = partial(_seconds, workers, batch)
    cache = (scheduler.limits, memory.num_blocks, memory.block_size, memory.num_twins)
    if options.max_step_ms is not None:
        chunks = warm_up_chunks(*cache)
        measure(chunks[0])  # it includes work that is done only once
        scheduler.cost.calibrate([(StepSize().plus(each.start, each.length), measure(each)) for each in chunks])
    if options.speculate:
        scheduler.proposals.row_cost = _measure_rows(row_chunks(*cache), measure)


def measure_draft(draft: DraftModel, scheduler: Scheduler, memory: MemoryPlan) -> None:
    """Measures the duration of a draft's steps by their rows, as `measure_steps` does for the model's."""
    chunks = row_chunks(scheduler.limits, memory.num_blocks, memory.block_size)
    draft.policy.row_cost = _measure_rows(chunks, partial(_seconds, draft.workers, draft.batch))


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


def _measure_rows(chunks: list[ScheduledChunk], measure: Measure) -> RowCost:
    """Measures chunks of ascending numbers of rows, fewer of them where steps are slow."""
    measure(chunks[0])
    measured: dict[int, float] = {}
    end = time.monotonic() + _MOST_SECONDS
    for chunk in chunks:
        if chunk.length > _LEAST_ROWS and time.monotonic() > end:
            break
        measured[chunk.length] = min(measure(chunk) for _ in range(_RUNS))
    return RowCost(measured)


def _seconds(workers: WorkerGroup, batch: BatchWriter, chunk: ScheduledChunk) -> float:
    """Returns the duration of a step of one chunk."""
    message = batch.write([chunk]).encode()
    begun = time.monotonic()
    workers.watch.begin(lambda: 0.0)
    workers.send(message)
    workers.send_tokens(workers.receive().token_ids)
    seconds = time.monotonic() - begun
    batch.release(chunk.sample)
    return seconds


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
