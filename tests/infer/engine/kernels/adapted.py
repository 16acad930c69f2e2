"""Backends in this process with adapters, and the logits of sequences that share steps."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from tk.checkpoint import Checkpoint
from tk.core.casts import Array
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.step.running_plan import NO_ADAPTER, RunningPlan
from tk.infer.engine.worker.adapter_order import AdapterOrder
from tk.infer.engine.worker.worker import load
from tk.model.stored_config import stored_config
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.sampling_row import SamplingRow, pack

JOB = Job("", "native", "fp32", "fp32", 120, 0, BLOCK_SIZE, 512, adapter_slots=3, max_adapter_rank=64)
Sequences = Sequence[tuple[Sequence[int], int]]  # tokens, and the slot of the adapter


def serving(base: Path, adapters: Sequence[Path], job: Job) -> Backend:
    """Returns a backend with adapters in its slots, in their order."""
    made = load(replace(job, checkpoint=str(base)))
    for slot, path in enumerate(adapters):
        put(made, slot, path, base, job)
    return made


def put(made: Backend, slot: int, path: Path, base: Path, job: Job) -> None:
    """Loads an adapter into a slot of a backend."""
    config = stored_config(Checkpoint.open(base)).model_dump(mode="json")
    order = AdapterOrder(slot, str(path), Checkpoint.open(path).folder.fingerprint, config)
    made.pack_adapter(slot, order.carry_out(job))()


def together(made: Backend, sequences: Sequences, steps: int = 1) -> list[Array]:
    """Returns the logits of every token of sequences that are computed together, in steps of nearly equal size."""
    num_blocks = max(len(tokens) for tokens, _ in sequences) // BLOCK_SIZE + 1
    tables = np.arange(1, 1 + len(sequences) * num_blocks, dtype=np.int32).reshape(len(sequences), -1)
    cuts = [np.linspace(0, len(tokens), steps + 1).astype(int) for tokens, _ in sequences]
    found: list[list[Array]] = [[] for _ in sequences]
    for step in range(steps):
        bounds = [(cut[step], cut[step + 1]) for cut in cuts]
        held = [i for i, (low, high) in enumerate(bounds) if low < high]
        places = [np.arange(*bounds[i], dtype=np.int32) for i in held]
        slots = [tables[i, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for i, at in zip(held, places, strict=True)]
        lengths = np.array([len(at) for at in places], np.int32)
        plan = RunningPlan(
            tokens=np.concatenate([np.array(sequences[i][0], np.int32)[slice(*bounds[i])] for i in held]),
            positions=np.concatenate(places),
            slots=np.concatenate(slots),
            span_length=lengths,
            block_tables=tables[held],
            rows=pack([SamplingRow(token) for token in range(lengths.sum())]),
            adapters=np.array([sequences[i][1] for i in held], np.int32),
        )
        for i, rows in zip(held, np.split(made.logits(plan), np.cumsum(lengths)[:-1]), strict=True):
            found[i].append(rows)
    return [np.concatenate(rows) for rows in found]


def alone(made: Backend, sequences: Sequences) -> list[Array]:
    """Returns the logits of every token of sequences, of each in a step of its own."""
    return [together(made, [each])[0] for each in sequences]


def over_ranks(base: Path, adapters: Sequence[Path], job: Job, sequences: Sequences, store: Path) -> list[Array]:
    """Returns the result of `together` on rank 0, each rank a thread of this process; for native kernels."""

    def work(rank: int) -> list[Array]:
        return together(serving(base, adapters, replace(job, rank=rank, store=str(store))), sequences)

    with ThreadPoolExecutor(job.tp) as pool:
        return next(iter(pool.map(work, range(job.tp))))


def prompts(
    vocab: int, lengths: Sequence[int] = (5, 21, 9, 14), slots: Sequence[int] = (0, NO_ADAPTER, 1, 0)
) -> Sequences:
    """Returns sequences of random tokens with these adapters."""
    random = np.random.default_rng(0)
    return [(random.integers(0, vocab, size).tolist(), slot) for size, slot in zip(lengths, slots, strict=True)]
