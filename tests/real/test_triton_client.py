"""NVIDIA's `tritonclient`, in an environment of its own, against the Open Inference Protocol of a server."""

import json
import os
import subprocess
from pathlib import Path

import grpc
import pytest

from tk.infer.client.client import Client
from tk.infer.client.connection import Credentials
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.access.tokens import Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub
from tk.tests.docs.blocks import all_blocks
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).with_name("triton_checks.py")
PUBLISHED = ROOT / "tests" / "proto" / "open_inference" / "published.txt"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


def test_tritonclient_works_unchanged(triton: Path, tmp_path: Path) -> None:
    tokens, tiny = tmp_path / "tokens", write_tiny_model(tmp_path / "tiny-llama", max_length=4096)
    tokens.write_text(line_of(token_digest("secret"), Caller("alice")))
    serving = Serving(str(tiny), "--kv-blocks", "512", "--tokens", str(tokens)).wait_ready()
    try:
        words = [str(triton), str(CHECKS), serving.target, tiny.name, "secret"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=2 * WAIT_SECONDS)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        with Client(serving.target, credentials=Credentials(token="secret")) as client:
            [expected] = client.generate("def main(", GREEDY)
        with grpc.insecure_channel(serving.target) as channel:
            metadata = (("authorization", "Bearer secret"),)
            report = AdminStub(channel).CheckCache(pb.CheckCacheRequest(), metadata=metadata, timeout=WAIT_SECONDS)
    finally:
        serving.close()
    theirs = set(found["fields"])
    ours = [line for line in PUBLISHED.read_text().splitlines() if " = " in line]
    assert [line for line in ours if line not in theirs] == []
    assert (found["health"], found["server"]) == ([True, True, True], "tk")
    assert found["model"][:2] == [tiny.name, ["0"]]
    assert found["model"][2] == [{"name": "text_input", "datatype": "BYTES", "shape": ["1"]}]
    assert (found["config"]["name"], found["config"]["backend"]) == (tiny.name, "tk")
    assert found["config"]["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": ["1"]}]
    assert found["batched"] == [[1, 1], expected.text]
    answer = {"text_output": [expected.text], "finish_reason": ["length"], "id": "mine"}
    assert found["answer"] == answer | {"model": tiny.name, "version": "0"}
    assert len(found["unnamed"]["text_output"]) == 2
    assert found["stream"]["texts"] == [expected.text]
    assert found["stream"]["messages"] > 2
    assert found["stream"]["error"].startswith("INVALID_ARGUMENT: parameters.top_p is 2")
    assert found["cancelled"] == "StatusCode.CANCELLED"
    assert (report.used, report.leaked, list(report.problems)) == (0, 0, [])
    check_refusals(found["refused"])


def test_the_example_of_the_page_runs(triton: Path, own: Serving) -> None:
    [block] = [each for each in all_blocks() if (each.page, each.kind) == ("docs/open-inference.md", "python")]
    code = block.code.replace("127.0.0.1:50051", own.target)
    done = subprocess.run([triton, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def check_refusals(refused: dict[str, tuple[str, str]]) -> None:
    """Each with its status, and the name of what was wrong."""
    for name, status, text in (
        ("tensor", "INVALID_ARGUMENT", "inputs[0].name is 'prompt'; it must be text_input."),
        ("datatype", "INVALID_ARGUMENT", "inputs[0].datatype is 'FP32'; it must be BYTES."),
        ("shape", "INVALID_ARGUMENT", "inputs[0].shape is [1, 2]"),
        ("output", "INVALID_ARGUMENT", "outputs[0].name is 'logits'"),
        ("parameter", "INVALID_ARGUMENT", "parameters.beam_width is unknown"),
        ("value", "INVALID_ARGUMENT", "parameters.temperature is -1"),
        ("priority", "INVALID_ARGUMENT", "parameters.priority is unknown"),
        ("model", "NOT_FOUND", "'another' is not served here"),
        ("version", "NOT_FOUND", "Version '77'"),
        ("late", "DEADLINE_EXCEEDED", ""),
        ("late by a parameter", "DEADLINE_EXCEEDED", ""),
        ("no token", "UNAUTHENTICATED", "needs a token"),
        ("another extension", "UNIMPLEMENTED", ""),
    ):
        found_status, found_text = refused.pop(name)
        assert found_status == f"StatusCode.{status}", name
        assert text in found_text, name
    assert refused == {}


@pytest.mark.parametrize(
    "order", ["tritonclient.grpc, tk.proto.open_inference", "tk.proto.open_inference, tritonclient.grpc"]
)
def test_one_process_may_have_both_statements_of_the_protocol(triton: Path, order: str) -> None:
    program = f"""
import {order}
from tk.proto.open_inference import open_inference_pb2 as ours
from tritonclient.grpc import service_pb2 as theirs
request = ours.ModelInferRequest(id="a", parameters={{"n": ours.InferParameter(uint64_param=2)}})
other = theirs.ModelInferRequest.FromString(request.SerializeToString())
assert ours.ModelInferRequest is not theirs.ModelInferRequest
assert ours.ModelInferRequest.FromString(other.SerializeToString()) == request
print(other.id, other.parameters["n"].uint64_param)
"""
    variables = os.environ | {"PYTHONPATH": str(ROOT / ".build")}
    done = subprocess.run([triton, "-c", program], capture_output=True, text=True, env=variables)
    assert (done.returncode, done.stdout) == (0, "a 2\n"), done.stderr
