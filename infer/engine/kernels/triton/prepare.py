"""The start of a rank on Triton's kernels, which are checked before they serve."""

import logging
from typing import Final

import torch

from .....core.errors import ConfigError
from .....core.integers import ceil_div
from .....parallel.collectives import all_reduce_max
from ...job import Job
from ...program.lower import Program
from ...program.weights import LoadParams
from ..aten.prepare import load_rank, runner_of
from ..backend import Backend
from .launches import FixedKernels, TritonKernels
from .run.assembly import assemble, with_slots
from .run.graphs import CudaGraphs, Recorder, RepeatedRuns
from .run.loaded_rank import LoadedRank
from .self_check import LONGEST, why_not_serve

_LOG: Final = logging.getLogger(__name__)


def prepare(job: Job, program: Program, load: LoadParams) -> Backend:
    """Loads a rank and returns Triton's backend, or that of ATen where "auto" finds that the check fails.

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: torch cannot use the GPU, the cache does not fit on it, or the kernels that are asked for fail
            their check.
    """
    loaded = with_slots(LoadedRank(program, *load_rank(job, program, load), is_fixed=job.batch_invariant), job)
    aten = runner_of(job, program, loaded.weights, loaded.cache, loaded.tp)
    try:
        found, reason = _checked(job, loaded, aten)
    except Exception as error:  # of Triton's compiler, whose errors have no common class, or of the driver
        if job.kernels == "triton":
            raise
        found, reason = aten, f"{type(error).__name__}: {str(error)[:300]}"
    if not _any_rank(bool(reason), loaded):
        return found
    reason = reason or "another rank cannot"
    if job.kernels == "triton":
        raise ConfigError(f"Triton's kernels cannot run this model here: {reason}. Use --kernels aten.")
    _LOG.info("The ATen backend runs this model, not Triton's kernels: %s.", reason)
    return aten


def _checked(job: Job, loaded: LoadedRank, aten: Backend) -> tuple[Backend, str]:
    """Returns Triton's backend and the reason why it cannot serve, "" if it can."""
    device = loaded.cache.device
    recorder: Recorder = CudaGraphs() if device.type == "cuda" else RepeatedRuns()
    made = assemble(job, loaded, FixedKernels if loaded.is_fixed else TritonKernels, recorder)
    if job.num_blocks < ceil_div(LONGEST, job.block_size):
        return made, ""  # no room for the check, nor for a prompt of that length
    return made, why_not_serve(made, aten, job, loaded.program.vocab_size)


def _any_rank(failed: bool, loaded: LoadedRank) -> bool:
    """Returns whether one of the ranks has failed: all take the same backend."""
    return bool(all_reduce_max(torch.tensor([int(failed)], device=loaded.cache.device), loaded.tp).item())
