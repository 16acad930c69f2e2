"""The measurement of steps before the first request, from which the scheduler knows the cost of steps."""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from ..options import EngineOptions
from ..planning.memory_plan import MemoryPlan
from ..schedule.batch_writer import BatchWriter
from ..schedule.costs.cost import StepSize
from ..schedule.costs.row_cost import RowCost
from ..schedule.samples.sample import ScheduledChunk
from ..schedule.scheduler import Scheduler
from ..schedule.warm_up import row_chunks, warm_up_chunks
from .worker_group import WorkerGroup

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
        scheduler.row_cost = _measure_rows(row_chunks(*cache), measure)


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
