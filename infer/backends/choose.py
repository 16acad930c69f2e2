"""The choice of the backend that computes a rank's steps."""

from ..planning.job import Job
from ..program.lower import Program
from ..program.weights import LoadParams
from .backend import Backend


def prepare(job: Job, program: Program, load: LoadParams) -> Backend:
    """Prepares the backend of a job; torch is imported only for the ATen backend.

    Args:
        job: the rank's job.
        program: the rank's program.
        load: loads the rank's parameters; see `program/weights.py`.

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: the job does not fit the machine.
    """
    from .aten.prepare import prepare as prepare_aten

    return prepare_aten(job, program, load)
