"""Native runners in this process, one per rank, and the logits of one sequence."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from tk.core.casts import Array
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.worker.worker import load
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.sampling_row import SamplingRow, pack

BEST = (instruction_sets() or ("",))[-1]
NUM_BLOCKS = 320


def runner(
    folder: Path,
    dtype: str = "fp32",
    kv_dtype: str = "fp32",
    threads: int = 1,
    instruction_set: str = BEST,
    place: tuple[int, int, str] = (1, 0, ""),
    weight_dtype: str = "",
    num_twins: int = 0,
) -> NativeRunner:
    """Returns a runner of a model with NUM_BLOCKS blocks; `place` is tp, rank and the file of the rendezvous."""
    job = Job(str(folder), "native", dtype, kv_dtype, NUM_BLOCKS, 0, BLOCK_SIZE, 512, *place, threads, instruction_set)
    made = load(replace(job, weight_dtype=weight_dtype, num_twins=num_twins))
    assert isinstance(made, NativeRunner)
    assert made.kernels == f"native {instruction_set}"
    return made


def logits(
    made: Backend, tokens: Sequence[int], cuts: Sequence[int], first_block: int = 1, block_size: int = BLOCK_SIZE
) -> Array:
    """Returns the logits of every token of one sequence, whose prefill is cut at these positions."""
    table, found = np.arange(first_block, first_block + len(tokens) // block_size + 1, dtype=np.int32), []
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        position = np.arange(start, stop, dtype=np.int32)
        plan = RunningPlan(
            tokens=np.array(tokens[start:stop], np.int32),
            positions=position,
            slots=table[position // block_size] * block_size + position % block_size,
            span_length=np.array([stop - start], np.int32),
            block_tables=table[None],
            rows=pack([SamplingRow(token) for token in range(stop - start)]),
        )
        found.append(made.logits(plan))
    return np.concatenate(found)


def rank_logits(
    folder: Path,
    tp: int,
    store: Path,
    tokens: Sequence[int],
    cuts: Sequence[int],
    dtype: str = "fp32",
    instruction_set: str = BEST,
    weight_dtype: str = "",
) -> Array:
    """Returns the result of `logits` on rank 0 of a model over `tp` ranks, each a thread of this process."""

    def work(rank: int) -> Array:
        made = runner(folder, dtype, dtype, 1 + rank % 2, instruction_set, (tp, rank, str(store)), weight_dtype)
        found = logits(made, tokens, cuts)
        made.close()
        return found

    with ThreadPoolExecutor(tp) as pool:
        return next(iter(pool.map(work, range(tp))))
