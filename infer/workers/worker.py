"""One tensor-parallel rank of the engine, in a process that `worker_entry.py` starts.

The worker loads its part of the model, reports that it is ready, and carries out step plans until the socket ends. Its
only state about requests is the content of the cache.
"""

import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ...checkpoint import Checkpoint
from ...core.dtypes import by_name
from ...core.errors import TkError, WorkerDied
from ...model.registry import decoder_spec
from ...model.stored_config import stored_config
from ..backends.backend import Backend
from ..backends.choose import prepare
from ..planning.job import Job
from ..program.lower import lower, serving_slices
from ..program.weights import load_params
from ..scheduling.step_plan import StepPlan
from .ipc import Frame, error_frame, receive, send


def load(job: Job) -> Backend:
    """Prepares the backend of a job with the weights of its checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError, ParallelError: the job does not fit the model or the machine.
    """
    checkpoint = Checkpoint.open(Path(job.checkpoint))
    spec = decoder_spec(stored_config(checkpoint))
    program = lower(spec, job.tp, job.rank, serving_slices(spec, job.tp, job.dtype))
    return prepare(job, program, partial(load_params, program, spec.table, checkpoint, by_name(job.dtype)))


def work(descriptor: int, prepare_backend: Callable[[Job], Backend] = load) -> None:
    """Serves the engine at the other end of a socket with a backend; returns when the engine has ended."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            _serve(connection, prepare_backend)
        except TkError as error:
            _report(connection, error)
        except Exception as error:
            traceback.print_exc()
            _report(connection, TkError(f"An inference worker failed: {type(error).__name__}: {error}"))


def _report(connection: socket.socket, error: TkError) -> None:
    """Reports an error and waits until the engine ends this process.

    If this process ended by itself, other ranks would fail too, and the engine might see their errors first.
    """
    with suppress(WorkerDied):  # the engine has ended or closed the connection
        send(connection, error_frame(error))
        receive(connection)


def _serve(connection: socket.socket, prepare_backend: Callable[[Job], Backend]) -> None:
    start = receive(connection)
    if start is None:
        return
    backend = prepare_backend(Job(**start.values))
    send(connection, Frame("ready", {"kernels": backend.kernels, "kv_bytes": backend.kv_bytes}))
    while (frame := receive(connection)) is not None:
        result = backend.step(StepPlan.from_arrays(frame.arrays))
        if result is not None:
            send(connection, Frame("result", arrays=result.arrays()))
