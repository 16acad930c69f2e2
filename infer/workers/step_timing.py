"""The measurement of steps before the first request, from which the scheduler knows the cost of steps."""

import time

from ..planning.memory_plan import MemoryPlan
from ..scheduling.batch_writer import BatchWriter
from ..scheduling.cost import StepSize
from ..scheduling.scheduler import Scheduler
from ..scheduling.warm_up import warm_up_chunks
from .worker_group import WorkerGroup


def measure_steps(
    workers: WorkerGroup, batch: BatchWriter, scheduler: Scheduler, memory: MemoryPlan, timeout: float
) -> None:
    """Measures the duration of steps of different sizes; the first one includes work that is done only once.

    Args:
        workers: the loaded workers, on the thread that may use them.
        batch: their slots, none of them in use.
        scheduler: the scheduler, which learns the durations.
        memory: the size of the cache.
        timeout: the time of a step, in seconds, after which a worker counts as dead.

    Raises:
        WorkerDied: see `WorkerGroup.receive`.
    """
    chunks = warm_up_chunks(scheduler.limits, memory.num_blocks, memory.block_size, memory.num_copies)
    measured = []
    for chunk in (chunks[0], *chunks):
        message = batch.write([chunk]).encode()
        begun = time.monotonic()
        workers.send(message, timeout)
        workers.receive(timeout)
        batch.release(chunk.sequence)
        measured.append((StepSize().plus(chunk.start, chunk.length), time.monotonic() - begun))
    scheduler.cost.calibrate(measured[1:])
