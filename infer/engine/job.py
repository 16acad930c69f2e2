"""The job that the engine gives every worker when it starts."""

import os
from dataclasses import dataclass

from ...core.cores import usable_cores
from ...core.numa import cores_per_rank, numa_nodes


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one rank; it travels as a frame's values.

    Attributes:
        checkpoint: the absolute path of the step folder or Hugging Face folder.
        kernels, dtype, kv_dtype: see EngineOptions; the dtypes are resolved, `kernels` is not.
        num_blocks, kv_bytes, block_size: the blocks of the cache, its bytes on a rank, and the tokens of a block.
        max_batched_tokens: the largest number of tokens of a step.
        tp, rank: the number of ranks, and this one.
        store: the file through which the ranks find each other.
        threads: the number of threads of a rank, on backends with threads of their own.
        instruction_set: the instruction set of native kernels; "" for the best that the machine can run.
        fingerprint: that of the checkpoint which the engine opened; "" for any.
        weight_dtype: see EngineOptions, resolved: the name of a dtype, or "int8" or "int4".
        num_twins: see `CacheShape`.
        on_gpus: whether each rank computes on the GPU of its number; else on the CPU.
        adapter_slots: see MemoryPlan.
        max_adapter_rank: see EngineOptions.
        adapts_experts: whether some adapters may have factors of experts.
        max_running: see EngineOptions.
        max_model_len: the largest number of tokens of a sequence; 0: as many as the cache holds.
        numa, batch_invariant: see EngineOptions.
        packed: the absolute path of `EngineOptions.packed`; "" for none.
        log: how the engine's process shows its log, and so the worker's: see `shown_form`.
    """

    checkpoint: str
    kernels: str
    dtype: str
    kv_dtype: str
    num_blocks: int
    kv_bytes: int
    block_size: int
    max_batched_tokens: int
    tp: int = 1
    rank: int = 0
    store: str = ""
    threads: int = 1
    instruction_set: str = ""
    fingerprint: str = ""
    weight_dtype: str = ""
    num_twins: int = 0
    on_gpus: bool = False
    log: str = ""
    adapter_slots: int = 0
    max_adapter_rank: int = 0
    adapts_experts: bool = False
    max_running: int = 64
    max_model_len: int = 0
    packed: str = ""
    numa: bool = False
    batch_invariant: bool = False


def threads_per_rank(tp: int, wanted: int | None = None, numa: bool = False) -> int:
    """Returns the number of threads of a rank: `wanted`, else OMP_NUM_THREADS, else the rank's share of the cores.

    With `numa` the share is one of the cores of the rank's node.
    """
    if wanted is not None:
        return wanted
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdigit() and int(given):
        return int(given)
    share = max(1, usable_cores() // tp)
    return min(share, cores_per_rank(numa_nodes(), tp)) if numa else share
