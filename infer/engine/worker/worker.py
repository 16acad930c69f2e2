"""One tensor-parallel rank of the engine, in a process that `worker_entry.py` starts.

The worker loads its part of the model, reports that it is ready, and carries out steps until the socket ends. Its state
about requests is the content of the cache and the slots of the persistent batch.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from ....checkpoint import Checkpoint
from ....core.console_log import show_log_as
from ....core.defects import known_or_defect
from ....core.dtypes import by_name
from ....core.errors import CheckpointError, TkError, WorkerDied
from ....model.registry import decoder_spec
from ....model.stored_config import stored_config
from ..kernels.backend import Backend
from ..kernels.choose import prepare
from ..kernels.engine_line import EngineLine
from ..planning.job import Job
from ..program.lower import lower, serving_slices
from ..program.quantization import groupings
from ..program.weights import load_params
from ..step.persistent_batch import PersistentBatch
from ..step.step_message import NextTokens, StepMessage, decode_message
from ..step.step_plan import Array, SamplerOutput
from .ipc import Frame, error_frame, receive, send

_NO_BLOCKS: Final = np.empty((0, 2), np.int32)


def load(job: Job) -> Backend:
    """Prepares the backend of a job with the weights of its checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError, ParallelError: the job does not fit the model or the machine.
    """
    checkpoint = Checkpoint.open(Path(job.checkpoint))
    if job.fingerprint not in ("", checkpoint.folder.fingerprint):
        raise CheckpointError(
            f"{checkpoint.path} was replaced or changed after the engine opened it, so its workers would serve another "
            "model under the old one's name. Start the command again."
        )
    spec = decoder_spec(stored_config(checkpoint))
    program = lower(spec, job.tp, job.rank, serving_slices(spec, job.tp, job.dtype))
    wide = groupings(program, job.weight_dtype)
    return prepare(job, program, partial(load_params, program, spec.table, checkpoint, by_name(job.dtype), wide=wide))


def work(descriptor: int, prepare_backend: Callable[[Job], Backend] = load) -> None:
    """Serves the engine at the other end of a socket with a backend; returns when the engine has ended."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            _serve(connection, prepare_backend)
        except Exception as error:
            _report(connection, known_or_defect(error, "An inference worker"))


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
    job = Job(**start.values)
    if job.log:  # of what every rank does alike, one shows the progress
        show_log_as(job.log, logging.WARNING if job.rank else logging.INFO)
    backend = prepare_backend(job)
    ready = {"kernels": backend.kernels, "kv_bytes": backend.kv_bytes, "samples": backend.samples}
    send(connection, Frame("ready", ready))
    _compute(connection, backend, PersistentBatch(job.block_size), answers=job.rank == 0)


def _compute(connection: socket.socket, backend: Backend, batch: PersistentBatch, answers: bool) -> None:
    """Computes steps until the engine ends. A step may come before the tokens of the one before it.

    Ranks that sample know these tokens, unless rows have candidates; otherwise the engine sends them after the step's
    result. Masks that a step needs before come after it, and before all later steps. Masks with which its rows are
    sampled again come before its tokens.

    Args:
        answers: whether this rank sends the results to the engine.
    """
    ahead: deque[StepMessage | NextTokens] = deque()
    knows_tokens = True
    next_step = Frame("step", body=NextTokens(_NO_BLOCKS).encode()).encode()
    again = Frame("again").encode()[:-4]  # up to the size of its body
    line = EngineLine(connection.fileno(), next_step, _result, _tokens, again, answers)
    while (frame := receive(connection)) is not None:
        if frame.op == "tokens":
            batch.feed(np.frombuffer(frame.body, np.int32))
            knows_tokens = True
        elif frame.op == "again":
            sampled = backend.sample_again(*_masks_of(frame))
            if answers:
                send(connection, _result(sampled))
        else:
            ahead.append(decode_message(frame.body))
        if ahead and knows_tokens:
            output = backend.step(batch.plan(ahead.popleft()), lambda: _masks(connection))
            knows_tokens = output is not None and not output.candidates.size
            if output is None:
                continue
            if answers:
                send(connection, _result(output))
            if knows_tokens:
                batch.feed(output.token_ids)
            if (went_on := backend.go_on(line)) is not None:
                if went_on.tokens is not None:
                    batch.feed(went_on.tokens)
                if went_on.has_next:
                    ahead.append(NextTokens(_NO_BLOCKS))


def _tokens(tokens: Array) -> bytes:
    return Frame("tokens", body=tokens.tobytes()).encode()


def _result(output: SamplerOutput) -> bytes:
    return Frame("result", body=output.encode()).encode()


def _masks(connection: socket.socket) -> Array:
    """Waits for the masks of the step that is computed: uint32 [M, W], M and W before them.

    Raises:
        WorkerDied: the engine has ended.
    """
    frame = receive(connection)
    if frame is None:
        raise WorkerDied("The engine ended before it sent the masks of a step.")
    return _masks_of(frame)[0]


def _masks_of(frame: Frame) -> tuple[Array, Array]:
    """Returns the masks of a frame, uint32 [M, W], and the numbers of rows behind them, int32."""
    shape = np.frombuffer(frame.body, np.int32, 2)
    masks: Array = np.frombuffer(frame.body, np.uint32, shape.prod(), shape.nbytes).reshape(shape)
    return masks, np.frombuffer(frame.body, np.int32, offset=shape.nbytes + masks.nbytes)
