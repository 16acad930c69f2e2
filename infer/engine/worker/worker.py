"""One tensor-parallel rank of the engine, in a process that `worker_entry.py` starts.

The worker loads its part of the model, reports that it is ready, and carries out steps until the socket ends. Its state
about requests is the content of the cache and the slots of the persistent batch.
"""

import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from ....checkpoint import Checkpoint
from ....core.console_log import quieter, show_log
from ....core.defects import known_or_defect
from ....core.dtypes import by_name
from ....core.errors import CheckpointError, TkError, WorkerDied
from ....core.numa import node_of_rank, numa_nodes
from ....model.registry import decoder_spec
from ....model.stored_config import stored_config
from ..job import Job
from ..kernels.backend import Backend
from ..kernels.choose import prepare
from ..program.lower import lower, serving_slices
from ..program.quantization import groupings
from ..program.weights import load_params
from ..step.channel import Channel, Frame, error_frame, masks_from, receive, send
from ..step.persistent_batch import PersistentBatch
from ..step.step_message import NEXT_TOKENS, GivenTokens, NextTokens, StepMessage, decode_message
from .adapter_loader import AdapterLoader

SWITCH_SECONDS: Final = 0.0005  # for which the loader of adapters may hold Python's lock while a step waits for it


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
    job = replace(job, fingerprint=checkpoint.folder.fingerprint)
    spec = decoder_spec(stored_config(checkpoint))
    program = lower(spec, job.tp, job.rank, serving_slices(spec, job.tp, job.dtype))
    wide = {*groupings(program, job.weight_dtype), *program.wide}
    return prepare(
        job, program, partial(load_params, program.params, spec.table, checkpoint, by_name(job.dtype), wide=wide)
    )


def work(descriptor: int, prepare_backend: Callable[[Job], Backend] = load, loader: int | None = None) -> None:
    """Serves the engine at the other end of a socket with a backend; returns when the engine has ended.

    Args:
        descriptor: that of the socket.
        prepare_backend: loads the model of a job.
        loader: the descriptor of the socket for orders to load adapters.
    """
    with socket.socket(fileno=descriptor) as connection, ExitStack() as stack:
        try:
            _serve(connection, prepare_backend, loader, stack)
        except Exception as error:
            _report(connection, known_or_defect(error, "An inference worker"))


def _report(connection: socket.socket, error: TkError) -> None:
    """Reports an error and waits until the engine ends this process.

    If this process ended by itself, other ranks would fail too, and the engine might see their errors first.
    """
    with suppress(WorkerDied):  # the engine has ended or closed the connection
        send(connection, error_frame(error))
        receive(connection)


def _serve(
    connection: socket.socket, prepare_backend: Callable[[Job], Backend], loader: int | None, stack: ExitStack
) -> None:
    start = receive(connection)
    if start is None:
        return
    job = Job(**start.values)
    if job.log:  # of what every rank does alike, one shows the progress
        show_log(quieter(job.log) if job.rank else job.log)
    if job.numa:  # before the first thread that computes or loads, which inherits it
        os.sched_setaffinity(0, node_of_rank(numa_nodes(), job.rank, job.tp))
    backend = prepare_backend(job)
    ready = {"kernels": backend.kernels, "kv_bytes": backend.kv_bytes, "samples": backend.samples}
    send(connection, Frame("ready", ready))
    put = _start_loader(backend, job, loader, stack)
    _compute(Channel(connection, answers=job.rank == 0, waits=True), backend, PersistentBatch(job.block_size), put)


def _start_loader(backend: Backend, job: Job, loader: int | None, stack: ExitStack) -> Callable[[int], object]:
    """Starts the loader of adapters, and returns what puts an adapter that it has packed into its slot."""
    if loader is None:
        return lambda number: None
    connection = socket.socket(fileno=loader)
    if not job.adapter_slots:
        stack.callback(connection.close)
        return lambda number: None
    sys.setswitchinterval(SWITCH_SECONDS)
    made = AdapterLoader(connection, lambda order: backend.pack_adapter(order.slot, order.carry_out(job)))
    stack.callback(made.close)
    return made.put


def _compute(channel: Channel, backend: Backend, batch: PersistentBatch, put_adapter: Callable[[int], object]) -> None:
    """Computes steps until the engine ends. A step may come before the tokens of the one before it.

    Ranks that sample know these tokens, unless rows have candidates; otherwise the engine sends them after the step's
    result. Masks that a step needs before come after it, and before all later steps. Masks with which its rows are
    sampled again come before its tokens.
    """
    messages: deque[StepMessage | NextTokens | GivenTokens] = deque()
    knows_tokens = True
    while (frame := channel.receive()) is not None:
        if frame.op == "tokens":
            batch.feed(np.frombuffer(frame.body, np.int32))
            knows_tokens = True
        elif frame.op == "again":
            channel.send_result(backend.sample_again(*masks_from(frame)))
        elif frame.op == "adapter":
            put_adapter(frame.values["number"])
        elif frame.op == "drop":
            backend.drop_adapter(frame.values["slot"])
        else:
            messages.append(decode_message(frame.body))
        if messages and knows_tokens:
            plan = batch.plan(messages.popleft())
            output = backend.step(plan, channel.receive_masks, channel)
            knows_tokens = output is not None and not output.candidates.size
            if output is None:
                continue
            if knows_tokens:
                batch.feed(output.token_ids)
            ahead = backend.decode_ahead(plan, channel)
            if ahead is None:
                continue
            batch.extend(ahead.new_blocks)
            if ahead.newest is not None:
                batch.leave(ahead.newest)
            elif ahead.tokens is not None:
                batch.feed(ahead.tokens)
            if ahead.has_next:
                messages.append(NEXT_TOKENS)
