"""A worker over a socket, on a thread of this process: it loads, says so, computes steps, and reports errors."""

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError, TkError
from tk.infer.engine.job import Job
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.batch_writer import BatchWriter
from tk.infer.engine.schedule.samples.sample import ScheduledChunk
from tk.infer.engine.step.channel import Frame, error_from, receive, send
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.sampling_rows import ScoredRow
from tk.infer.engine.worker import worker as worker_module
from tk.infer.engine.worker.worker import work
from tk.tests.infer.engine.schedule.new_sample import new_sample


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """The engine's end of a socket; a worker serves the other."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    worker = threading.Thread(target=work, args=(theirs.detach(),))
    worker.start()
    with ours:
        yield ours
    worker.join(60)
    assert not worker.is_alive(), "it ends with the connection"


def job(folder: Path) -> dict[str, Any]:
    """Returns the job of a single rank."""
    return asdict(
        Job(str(folder), "aten", "fp32", "fp32", num_blocks=3, kv_bytes=0, block_size=16, max_batched_tokens=16)
    )


def answer(connection: socket.socket) -> Frame:
    frame = receive(connection)
    assert frame is not None
    return frame


def test_it_loads_and_computes_as_transformers_does(
    connection: socket.socket, model_folder: Callable[[str], Path], reference: Callable[[str], LlamaForCausalLM]
) -> None:
    send(connection, Frame("start", job(model_folder("grouped"))))
    ready = answer(connection)
    assert (ready.op, ready.values["kernels"]) == ("ready", "aten")
    assert ready.values["kv_bytes"] == 2 * 2 * (3 + 1) * 16 * 4 * 8 * 4, "2 layers, 4 kv heads of 8 in fp32"
    tokens = [5, 6, 7]
    sample = new_sample(0, tokens, 9, SamplingParams(temperature=0))
    sample.table.blocks = [1]
    writer = BatchWriter(1)
    message = writer.write([ScheduledChunk(sample, 0, 3)], [ScoredRow(token=0, target=6)])
    send(connection, Frame("step", body=message.encode()))
    with torch.no_grad():
        logits = reference("grouped")(torch.tensor([tokens])).logits[0]
    result = answer(connection)
    assert result.op == "result"
    assert SamplerOutput.decode(result.body).token_ids.tolist() == [6, int(logits[2].argmax())]


def test_weights_that_changed_since_the_engine_opened_them_are_refused(
    connection: socket.socket, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder("grouped"), tmp_path / "model")
    opened = Checkpoint.open(folder).folder.fingerprint
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    send(connection, Frame("start", job(folder) | {"fingerprint": opened}))
    error = error_from(answer(connection))
    assert isinstance(error, CheckpointError)
    assert "was replaced or changed after the engine opened it" in str(error)


def test_an_error_keeps_its_class(connection: socket.socket, tmp_path: Path) -> None:
    send(connection, Frame("start", job(tmp_path / "nowhere")))
    error = error_from(answer(connection))
    assert isinstance(error, CheckpointError)
    assert "nowhere does not exist" in str(error)


def test_a_bug_is_reported_as_a_failed_worker(connection: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    send(connection, Frame("start", {"tp": 1}))
    error = error_from(answer(connection))
    assert type(error) is TkError
    assert str(error).startswith("An inference worker (process ")
    assert "failed by a defect of tk (TypeError)" in str(error)
    assert [record.exc_info is not None for record in caplog.records] == [True], "the log has its traceback"


def test_it_ends_with_an_engine_that_never_starts_it(connection: socket.socket) -> None:
    connection.close()


def test_a_worker_stays_on_its_node(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two nodes, and the second of two ranks; the set is made before the model is loaded."""
    done: list[object] = []
    monkeypatch.setattr(worker_module, "numa_nodes", lambda: (frozenset({0, 1}), frozenset({2, 3})))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: done.append((process, cores)))
    send(connection, Frame("start", job(Path("no model")) | {"numa": True, "tp": 2, "rank": 1}))
    assert isinstance(error_from(answer(connection)), CheckpointError)
    assert done == [(0, {2, 3})]
