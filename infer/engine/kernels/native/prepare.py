"""The start of a rank on native kernels: its weights, packed as they are read, its cache and its threads."""

import logging
from typing import Final

from .....checkpoint.read.shared_read import ALONE, Peers
from .....core.dtypes import BF16, by_name
from .....core.errors import ConfigError
from .....core.process import freed_memory_returned
from ...job import Job
from ...kv_formats import CacheShape, kv_format
from ...program.lower import Program
from ...program.operations import Route
from ...program.weights import LoadParams
from ..loading import load_weights
from .binding.library import BF16_SETS, Kernels, instruction_sets, load_kernels
from .binding.structures import MAX_GROUPS, MAX_RANKS, PANEL
from .link import FileGather
from .model_runner import NativeRunner
from .packed.shared_weights import shared_weights
from .packing import PackedWeights
from .self_check import why_not as why_not_serve

MAX_INT8_HEAD: Final = 512  # products of longer heads could exceed 32 bits: see c/pages.h
_LOG: Final = logging.getLogger(__name__)


def why_not(job: Job, program: Program) -> str:
    """Returns the reason why native kernels cannot run a job on this machine; "" if they can."""
    for name, value, unit in (
        ("hidden_size", program.hidden_size, PANEL),
        ("head_dim", program.head_dim, PANEL // 2),
        ("block_size", job.block_size, PANEL),
    ):
        if value % unit:
            return f"{name} = {value} is not a multiple of {unit}"
    if kv_format(job.kv_dtype).is_rotated and program.head_dim > MAX_INT8_HEAD:
        return f"head_dim = {program.head_dim} is more than {MAX_INT8_HEAD} with {job.kv_dtype} keys and values"
    groups = max((each.num_groups for each in program.operations if isinstance(each, Route)), default=1)
    if groups > MAX_GROUPS:
        return f"n_group = {groups} is more than {MAX_GROUPS}"
    if program.tp > MAX_RANKS:
        return f"tp = {program.tp} is more than {MAX_RANKS}"
    return "" if instruction_sets() else "this machine has no library of kernels"


def prepare(job: Job, program: Program, load: LoadParams) -> NativeRunner:
    """Loads this rank's weights, allocates its cache and starts its threads. `why_not` has returned "".

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: the job demands an instruction set that this machine cannot run, or its folder of packed weights
            cannot be used.
    """
    kernels = _kernels(job.instruction_set, job.dtype)
    peers = Peers(job.rank, job.tp, FileGather(job.store, job.rank, job.tp)) if job.tp > 1 else ALONE

    def pack() -> PackedWeights:
        weights = PackedWeights(program, by_name(job.dtype), kernels, job.weight_dtype)
        with freed_memory_returned():
            weights.key_factors = load_weights(job, program, load, weights.take, peers, job.threads)
        return weights

    weights = shared_weights(job, program, kernels, peers, pack) if job.packed else pack()
    adapters = job.adapter_slots, job.max_adapter_rank
    cache = CacheShape(job.num_blocks, job.block_size, job.kv_dtype, job.num_twins)
    return NativeRunner(program, weights, cache, job.max_batched_tokens, job.threads, peers, adapters)


def _kernels(name: str, dtype: str) -> Kernels:
    """Returns the kernels of an instruction set; if none is named, of the best for a dtype that pass their check."""
    for each in reversed(instruction_sets()):
        wanted = each == name if name else dtype == BF16.name or each not in BF16_SETS
        kernels = load_kernels(each) if wanted else None
        if kernels is None:
            continue
        reason = why_not_serve(kernels)
        if not reason:
            return kernels
        _LOG.warning("The kernels for %s are not used on this machine: %s.", each, reason)
    raise ConfigError(
        f"This machine cannot run native kernels for {name or 'any instruction set'}; use --kernels aten."
    )
