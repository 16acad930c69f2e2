"""The start of a rank on native kernels: its weights, packed as they are read, its cache and its threads."""

import logging
from typing import Final

from ....checkpoint.read.shared_read import ALONE, Peers
from ....core.dtypes import by_name
from ....core.errors import ConfigError
from ...planning.job import Job
from ...program.lower import Program
from ...program.weights import LoadParams
from ..backend import CacheShape
from .library import Kernels, instruction_sets, load_kernels
from .link import FileGather
from .model_runner import NativeRunner
from .packing import PackedWeights
from .self_check import products_are_right
from .structures import MAX_RANKS, PANEL

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
    if program.tp > MAX_RANKS:
        return f"tp = {program.tp} is more than {MAX_RANKS}"
    return "" if instruction_sets() else "this machine has no library of kernels"


def prepare(job: Job, program: Program, load: LoadParams) -> NativeRunner:
    """Loads this rank's weights, allocates its cache and starts its threads. `why_not` has returned "".

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: the job demands an instruction set that this machine cannot run.
    """
    kernels = _kernels(job.instruction_set)
    weights = PackedWeights(program, by_name(job.dtype), kernels)
    peers = Peers(job.rank, job.tp, FileGather(job.store, job.rank, job.tp)) if job.tp > 1 else ALONE
    load(weights.take, peers)
    cache = CacheShape(job.num_blocks, job.block_size, job.kv_dtype)
    return NativeRunner(program, weights, cache, kernels, job.max_batched_tokens, job.threads, peers)


def _kernels(name: str) -> Kernels:
    """Returns the kernels of an instruction set; of the best whose products are right if none is named."""
    sets = instruction_sets()
    for each in reversed(sets):
        kernels = load_kernels(each) if name in ("", each) else None
        if kernels is None:
            continue
        if products_are_right(kernels):
            return kernels
        _LOG.warning("The kernels for %s compute wrong products on this machine and are not used.", each)
    raise ConfigError(
        f"This machine cannot run native kernels for {name or 'any instruction set'}; use --kernels aten."
    )
