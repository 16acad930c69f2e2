"""The choice of the backend that computes a rank's steps."""

import logging
from typing import Final

from ....core.errors import ConfigError
from ..job import Job
from ..program.lower import Program
from ..program.weights import LoadParams
from .backend import Backend
from .batch_check import why_not_invariant
from .native.prepare import prepare as prepare_native
from .native.prepare import why_not
from .probed_adapter import probed_adapter

_LOG: Final = logging.getLogger(__name__)


def prepare(job: Job, program: Program, load: LoadParams) -> Backend:
    """Prepares the backend of a job (see `_prepare`), and checks that it keeps `Job.batch_invariant`, if that is set.

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: as `_prepare` does, or logits depend on the batch.
    """
    backend = _prepare(job, program, load)
    if job.batch_invariant and (reason := _why_not_invariant(backend, job, program)):
        raise ConfigError(
            f"--batch-invariant cannot be kept on rank {job.rank} with the kernels {backend.kernels}: {reason}. Take "
            "others with --kernels, or leave the option out."
        )
    return backend


def _why_not_invariant(backend: Backend, job: Job, program: Program) -> str:
    """Checks rows without an adapter and, where there are slots, rows with one that only the check has."""
    reason = why_not_invariant(backend.logits, job, program.vocab_size)
    if reason or not job.adapter_slots:
        return reason
    backend.pack_adapter(0, probed_adapter(program, job))()
    reason = why_not_invariant(backend.logits, job, program.vocab_size, slot=0)
    backend.drop_adapter(0)
    return reason and f"with an adapter {reason}"


def _prepare(job: Job, program: Program, load: LoadParams) -> Backend:
    """Prepares the backend of a job; torch is imported only for the ATen backend.

    "auto" takes Triton's kernels on GPUs where `triton/reasons.py` finds nothing against them and their check passes,
    else ATen's there. Without GPUs it takes native kernels if they cover the whole program.

    Args:
        job: the rank's job.
        program: the rank's program.
        load: loads the rank's parameters; see `program/weights.py`.

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: the job does not fit the machine, kernels are requested that cannot run it, or packed weights are
            and native kernels do not compute.
    """
    if job.kernels == "triton" or (job.kernels == "auto" and job.on_gpus):
        _refuse_packed(job, "Triton's")
        from .triton.prepare import prepare as prepare_triton

        return prepare_triton(job, program, load)
    if job.kernels != "aten":
        reason = why_not(job, program)
        if not reason:
            return prepare_native(job, program, load)
        if job.kernels == "native":
            raise ConfigError(f"The native kernels cannot run this model: {reason}. Use --kernels auto or aten.")
        _LOG.info("The ATen backend runs this model, not the native one: %s.", reason)
    _refuse_packed(job, "torch's")
    from .aten.prepare import prepare as prepare_aten

    return prepare_aten(job, program, load)


def _refuse_packed(job: Job, whose: str) -> None:
    """Raises ConfigError if packed weights are asked for, which only native kernels read."""
    if job.packed:
        raise ConfigError(
            f"--packed keeps the weights of native kernels, and {whose} compute this model: leave it out."
        )
