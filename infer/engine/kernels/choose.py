"""The choice of the backend that computes a rank's steps."""

import logging
from typing import Final

from ....core.errors import ConfigError
from ..job import Job
from ..program.lower import Program
from ..program.weights import LoadParams
from .backend import Backend
from .native.prepare import prepare as prepare_native
from .native.prepare import why_not

_LOG: Final = logging.getLogger(__name__)


def prepare(job: Job, program: Program, load: LoadParams) -> Backend:
    """Prepares the backend of a job; torch is imported only for the ATen backend.

    "auto" takes native kernels if they cover the whole program, also beside GPUs: those compute if "aten" is asked for.

    Args:
        job: the rank's job.
        program: the rank's program.
        load: loads the rank's parameters; see `program/weights.py`.

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: the job does not fit the machine, or native kernels are requested and cannot run it, or packed
            weights are and the ATen backend computes.
    """
    if job.kernels != "aten":
        reason = why_not(job, program)
        if not reason:
            return prepare_native(job, program, load)
        if job.kernels == "native":
            raise ConfigError(f"The native kernels cannot run this model: {reason}. Use --kernels auto or aten.")
        _LOG.info("The ATen backend runs this model, not the native one: %s.", reason)
    if job.packed:
        raise ConfigError("--packed keeps the weights of native kernels, and torch's compute this model: leave it out.")
    from .aten.prepare import prepare as prepare_aten

    return prepare_aten(job, program, load)
