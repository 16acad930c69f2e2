"""A real server whose standard error is a pipe that nothing reads: it answers all the same, and ends when asked to."""

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from tk.infer.client.client import Client
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

CALLS = 400  # whose lines are more than a pipe holds


@pytest.mark.parametrize("form", ["json", pytest.param("text", marks=pytest.mark.matrix)])
def test_a_server_whose_log_is_not_read_serves_on(tmp_path: Path, form: str) -> None:
    reader, writer = os.pipe()
    serving = Serving(str(write_tiny_model(tmp_path / "model")), "--kv-blocks", "16", "--log-format", form, log=writer)
    os.close(writer)
    try:
        serving.wait_ready()
        request = pb.GenerateRequest(text="a", stopping={"max_new_tokens": 1})
        with grpc.insecure_channel(serving.target) as channel:
            stub: Any = GenerationStub(channel)
            calls = [stub.GenerateOnce.future(request, timeout=60) for _ in range(CALLS)]
            assert {call.code() for call in calls} == {grpc.StatusCode.OK}
        with Client(serving.target, timeout=60) as client:
            [answer] = client.generate("a", SamplingParams(max_new_tokens=5, ignore_eos=True))
        assert len(answer.token_ids) == 5
        assert serving.end(signal.SIGTERM)[0] == 0
    finally:
        serving.close()
        os.set_blocking(reader, False)
        read = os.read(reader, 1 << 20)
        os.close(reader)
    assert 40_000 < len(read) < CALLS * 250, "the pipe was full"
